from benchmarks.survival.matrix import main

if __name__ == "__main__":
    main()

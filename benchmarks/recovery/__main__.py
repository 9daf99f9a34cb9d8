from benchmarks.recovery.table import main

if __name__ == "__main__":
    main()

from benchmarks.step_overhead.table import main

if __name__ == "__main__":
    main()

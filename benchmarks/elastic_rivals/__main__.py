from benchmarks.elastic_rivals.table import main

if __name__ == "__main__":
    main()

from benchmarks.scale.table import main

if __name__ == "__main__":
    raise SystemExit(main())

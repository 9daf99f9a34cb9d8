import logging

from benchmarks.checkpoint.table import main

if __name__ == "__mp_main__":  # a process that DCP starts: it would log every save
    logging.disable(logging.WARNING)
if __name__ == "__main__":
    main()

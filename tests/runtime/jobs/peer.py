"""One rank of two that only look after each other: `peer.py RANK HOST`."""

import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from spotguard.runtime.distributed.rendezvous import Rendezvous
from spotguard.runtime.preemption.peer_monitor import Peers
from spotguard.shared.net import address_towards


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> None:
    rank, host, port = int(sys.argv[1]), sys.argv[2], 4999
    store = None
    if not rank:
        wait = timedelta(seconds=30)
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=wait)
    peers = Peers(
        rank,
        2,
        timeout_s=2.0,
        on_lost=lambda peer, why: say(f"lost {peer}: {why}"),
        address=address_towards(host),
    )
    peers.start(Rendezvous(host, port, "test"))
    while len(peers._links) < 2:
        time.sleep(0.01)
    say("joined")
    time.sleep(60)
    del store


if __name__ == "__main__":
    main()

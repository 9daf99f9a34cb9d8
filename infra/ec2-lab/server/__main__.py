"""moto's server, in which an EC2 instance is a real Linux node on this machine.

    python infra/ec2-lab/server DATA [ADDRESS [PORT]]

RunInstances boots a node under the private and public address that DescribeInstances reports; Stop,
Start and TerminateInstances, a shutdown from inside, and a spot interruption do to it what they
should. S3, STS and IAM are moto's own. Below `/_lab/` it takes the lab's verbs: see ec2_lab.sh.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed.wsgi import StartResponse, WSGIEnvironment


def main() -> None:
    """Serve until told to leave, or until the process that we are for is gone."""
    settings.prepare()
    import account
    import prices
    from gate import Gate
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from nodes import nodes, remove_network
    from verbs import Verbs
    from werkzeug.serving import WSGIRequestHandler, run_simple

    def leave(*_: object) -> None:
        for node in list(nodes.values()):
            if node.alive:
                node.kill()
        time.sleep(0.3)
        for node in nodes.values():
            remove_network(f"ec2-{node.short}")
        os._exit(0)

    class Quiet(WSGIRequestHandler):
        """A handler that logs nothing: the journal of calls says more."""

        def log_request(self, *_: object) -> None:
            pass

    prices.load()
    account.install()
    gate = Gate(DomainDispatcherApplication(create_backend_app))
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    owner = os.environ.get("EC2LAB_FOR_PID")
    if owner:
        threading.Thread(target=_leave_after, args=(int(owner),), daemon=True).start()
    application = _with_verbs(gate, Verbs(gate))
    run_simple(settings.ADDRESS, settings.PORT, application, threaded=True, request_handler=Quiet)


def _leave_after(pid: int) -> None:
    """Take the lab down once the process that wanted it is gone, however it ended.

    Whoever wants the next lab may have begun already: what is not ours any more stays.
    """
    while Path(f"/proc/{pid}").exists():
        time.sleep(2.0)
    script = settings.INFRA / "ec2-lab" / "ec2_lab.sh"
    ends_us_too = ["bash", str(script), "down-of", str(os.getpid())]
    subprocess.Popen(ends_us_too, start_new_session=True)


def _with_verbs(gate: Any, verbs: Any) -> Any:
    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if not path.startswith("/_lab/"):
            answer: Iterable[bytes] = gate(environ, start_response)
            return answer
        query = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
        try:
            status, said = "200 OK", verbs(path.removeprefix("/_lab/"), query)
        except (KeyError, ValueError, OSError) as problem:
            status, said = "400 Bad Request", f"{type(problem).__name__}: {problem}"
        body = (json.dumps(said, indent=1) + "\n").encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    return application


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

"""A process that has imported vLLM, and forks another for each engine that is asked for: `nursery.py SOCKET`.

The import takes longer than the start of an engine of the small model. A fork shares nothing else with its siblings.
It ends when its standard input does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys


def main() -> None:
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    import kvlab.kvstore.vllm.connector  # noqa: F401
    from kvstore.vllm.user import serve

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        print("open", flush=True)
        while sys.stdin not in (ready := select.select([door, sys.stdin], [], [])[0]):
            line, _ = ready[0].accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                door.close()
                serve(line)
                os._exit(0)
            line.close()


if __name__ == "__main__":
    main()

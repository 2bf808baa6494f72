"""A role that the cluster tests run as a child, `python -m tests.unit.kvrelay.cluster.fake_role ROLE`; no model.

What it does beyond serving is said by the variable FAKE_ROLE: `crash ROLE` ends it at once, `stubborn ROLE` ignores
SIGTERM. The gateway claims as many prefill workers as FAKE_PREFILL says.
"""

import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    role, flags = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    behaviour = os.environ.get("FAKE_ROLE", "")
    if behaviour == f"crash {role}":
        sys.stderr.write(
            '{"level": "info", "event": "loading"}\n{"level": "error", "event": "role.failed", "error": "no luck"}\n'
        )
        sys.exit(1)

    def on_term(*_: Any) -> None:
        if behaviour != f"stubborn {role}":
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    if role == "gateway":
        # Late: the gateway says that its workers are there, so those must handle signals before it can answer.
        from kvrelay.v1 import inference_service_pb2 as pb
        from tests.unit.kvrelay.fake_gateway import FakeGateway, serving

        fake = FakeGateway()
        fake.instance_id = flags["--instance-id"]
        workers = [("prefill", int(os.environ.get("FAKE_PREFILL", "1"))), ("decode", 1)]
        fake.workers = [
            pb.WorkerSummary(worker_id=f"{tier}-{index}", role=tier, is_connected=not behaviour.startswith("crash"))
            for tier, count in workers
            for index in range(count)
        ]
        with serving(fake, int(flags["--port"])):
            _sleep()
    _sleep()


def _sleep() -> None:
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    main()

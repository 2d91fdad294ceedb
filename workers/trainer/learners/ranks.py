"""The other processes of a learner, seen from rank 0: it starts them, tells each call to all, and ends with them.

    rank 0 --- a JSON line per call, by stdin ---> rank 1, rank 2, ... (rank.py)
    rank 0 <--- WRITTEN, once per snapshot, by stdout ---

Rule 1: a rank that ends unasked ends this process too, whatever it is doing: the others would wait for it for ever, and
   nothing half trained is kept. The supervisor starts the trainer again from its checkpoint.
Rule 2: no rank outlives rank 0: its stdin ends, and Linux tells it.
"""

import json
import os
import subprocess
import sys
import threading

from workers.runtime.log import Log

END_LIMIT_S = 30.0
WRITTEN = b"written\n"


class Ranks:
    """Ranks 1 .. `ranks` - 1."""

    def __init__(self, ranks: int) -> None:
        """They load their libraries while this process does."""
        self._log = Log("trainer")
        self._ending = False
        command = [sys.executable, "-m", "workers.trainer.learners.rank"]
        self._processes = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for rank in range(1, ranks)
        ]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def tell(self, call: str, **arguments: object) -> None:
        """The same call, with the same arguments, to each of them."""
        line = json.dumps([call, arguments]).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()

    def wait_until_written(self) -> None:
        """Each of them has written its part of the snapshot. One that could not has ended, and so does this process."""
        for process in self._processes:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said in (WRITTEN, b""), said
            if not said:
                process.wait()

    def close(self, *, at_once: bool = False) -> None:
        """They end after what they do now, killed at the limit; or at once."""
        self._ending = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            if at_once:
                process.kill()
        for process in self._processes:
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if code or not self._ending:
            self._log.error("rank_ended", rank=rank, code=code)
        if not self._ending:
            os._exit(2 if code == 2 else 1)

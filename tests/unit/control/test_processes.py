"""What the kernel says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from deadpool_ext.control import processes


def test_a_stopped_process_dies_of_being_killed_and_its_end_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert processes.state(child.pid) in ("R", "S", "D")
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert processes.state(child.pid) == "T"
        assert not processes.wait_dead([child.pid], 0.01)
        assert processes.wait_dead(processes.kill_tree(child.pid), 10.0)
        assert processes.state(child.pid) == "Z"
    finally:
        child.kill()
        child.wait()
    assert processes.state(child.pid) is None
    assert processes.wait_dead([child.pid], 0.0)

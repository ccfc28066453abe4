"""Ways to break the order and the end of copies that a CPU stream hands to its native thread."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

CAUGHT: Final = ("queued copies",)
NOTIFIED: Final = ("notifications",)

STREAM: Final = "engine_shim.device_cpu_stream"

MUTANTS: Final = (
    Mutant(
        "a copy that waits for its turn does not hold those behind it",
        STREAM,
        "            op.holds = not op.flows\n",
        "",
        CAUGHT,
    ),
    Mutant(
        "copies wait for notifications",
        STREAM,
        "function, holds=False",
        "function, holds=True",
        CAUGHT,
    ),
    Mutant(
        "a copy does not wait for a host function",
        STREAM,
        "function, holds=True",
        "function, holds=False",
        CAUGHT,
    ),
    Mutant(
        "a copy does not wait for an event that is open",
        STREAM,
        "Op(label, run, holds=True)",
        "Op(label, run)",
        CAUGHT,
    ),
    Mutant(
        "what held copies up holds them for ever",
        STREAM,
        "            self._holding -= op.holds\n            self._in_hand.remove(op)\n",
        "            self._in_hand.remove(op)\n",
        CAUGHT,
    ),
    Mutant(
        "a copy with a notification that was held up holds nothing for ever",
        STREAM,
        "            op.holds = False\n",
        "",
        CAUGHT,
    ),
    Mutant(
        "a copy that was held up holds others until its notification has returned",
        STREAM,
        "            self._holding -= op.holds\n            op.holds = False\n",
        "",
        CAUGHT,
    ),
    Mutant(
        "a notification of a copy learns nothing of it",
        STREAM,
        "                    op.then(self._noted(op, failure))\n",
        "                    self._noted(op, failure)\n                    op.then(None)\n",
        NOTIFIED,
    ),
    Mutant(
        "a failure of a copy is one of its notification, too",
        STREAM,
        "                    failure = failure if is_cancelled else None\n",
        "",
        NOTIFIED,
    ),
    Mutant(
        "a copy that waits for its turn has the spans of then",
        STREAM,
        "        self._triples = self._spans.buffer.tobytes()\n",
        "        pass\n",
        CAUGHT,
    ),
    Mutant(
        "a copy that runs is cancelled",
        STREAM,
        "        return self._ticket > 0\n",
        "        return False\n",
        CAUGHT,
    ),
    Mutant(
        "copies that were handed over are not cancelled",
        STREAM,
        "            op.withdraw()\n",
        "            pass\n",
        CAUGHT,
    ),
    Mutant(
        "copies are taken back from the first to the last",
        STREAM,
        "        for op in reversed(self._queue):\n",
        "        for op in self._queue:\n",
        CAUGHT,
    ),
    Mutant(
        "a copy that was taken back counts as begun",
        STREAM,
        "            self._ticket = 0\n\n    def begun",
        "            pass\n\n    def begun",
        CAUGHT,
    ),
    Mutant(
        "a copy that finds no thread is lost",
        STREAM,
        "            op.flows = self._holding == 0 and copy.start()\n",
        "            op.flows = self._holding == 0 and (copy.start() or True)\n",
        CAUGHT,
    ),
    Mutant(
        "a full queue of copies does not rouse the stream",
        STREAM,
        "                self._copies.rouse()  # the thread",
        "                pass  # the thread",
        CAUGHT,
    ),
)

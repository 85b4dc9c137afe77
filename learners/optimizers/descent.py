"""Whether a factory's optimizer descends: one of the wrong sign would train upwards, and one that never moves not at all.

The slope of a step is the inner product of its update and its gradient. It is negative if the step goes downhill, and 0 if
nothing moves. Neither the loss of one step nor that of one batch says so as reliably.
"""

from __future__ import annotations

from orchestrator.errors import ConfigurationError

WITH_MOMENTUM = 5
"""How many slopes in a row must be positive after a state was imported: its momentum may point against single gradients."""
STILL_STEPS_MAX = 1_000
"""Steps without any movement that a factory may begin with, in a job of twice as many or more."""


class DescentCheck:
    """Judge the first slopes of a trainer; then judge nothing more.

    A slope of 0 decides nothing: warm-up from a learning rate of 0, and updates that several steps collect, begin with them.
    Too many of them are refused: more than half of the job's ``steps``, or than ``STILL_STEPS_MAX``.
    """

    def __init__(self, factory: str, steps: int) -> None:
        self._factory = factory
        self._needed, self._positive_count, self._decided = 1, 0, False
        self._still_count, self._still_max = 0, min(STILL_STEPS_MAX, steps // 2)

    def state_was_imported(self) -> None:
        """Begin again: the state may come from a peer, or from a checkpoint that another build wrote."""
        self._needed, self._positive_count, self._decided = WITH_MOMENTUM, 0, False

    def judge(self, slope: float) -> None:
        """Raise ConfigurationError if the slopes so far show that the optimizer ascends, or does nothing."""
        if self._decided:
            return
        if not slope:
            self._still_count += 1
            if self._still_count > self._still_max:
                raise ConfigurationError(
                    detail=f"training.inner_optimizer.factory {self._factory!r} returns an optimizer that did not change "
                    f"the parameters in {self._still_count:,} steps. Return one that moves them, such as optax.adamw(3e-4), "
                    "or lower the number of steps that it waits for."
                )
            return
        if not slope > 0.0:  # downhill; or not a number, which is for the checks of contributions to refuse
            self._decided = True
            return
        self._positive_count += 1
        if self._positive_count >= self._needed:
            raise ConfigurationError(
                detail=f"training.inner_optimizer.factory {self._factory!r} returns an optimizer that ascends: the inner "
                f"product of its update and the gradient is {slope:.3g}, and must be negative. Updates are added to the "
                "parameters, as everywhere in optax. Return a whole optimizer such as optax.adamw(3e-4); behind a bare "
                "direction such as optax.scale_by_adam() chain optax.scale_by_learning_rate(3e-4)."
            )

"""Whether a factory's optimizer descends: a factory that got optax's convention the wrong way round would train upwards.

The slope of a step is the inner product of its update and its gradient. It is negative if the step goes downhill. Neither
the loss of one step nor that of one batch says so as reliably.
"""

from __future__ import annotations

from orchestrator.errors import ConfigurationError

WITH_MOMENTUM = 5
"""How many slopes in a row must be positive after a state was imported: its momentum may point against single gradients."""


class DescentCheck:
    """Judge the first slopes of a trainer; then judge nothing more.

    Slopes of 0 say nothing: warm-up from a learning rate of 0, and updates that several steps collect, begin with them.
    """

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._needed, self._positive_count, self._decided = 1, 0, False

    def state_was_imported(self) -> None:
        """Begin again: the state may come from a peer, or from a checkpoint that another build wrote."""
        self._needed, self._positive_count, self._decided = WITH_MOMENTUM, 0, False

    def judge(self, slope: float) -> None:
        """Raise ConfigurationError if the slopes so far show that the optimizer ascends."""
        if self._decided or not slope:
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

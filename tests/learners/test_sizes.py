"""What is known of the built-in models without JAX is true of them."""

from __future__ import annotations

import math

from api.simulation.worlds import PARAMETERS
from learners.model import PRESETS, parameter_shapes


def test_the_simulated_world_weighs_the_built_in_models_as_they_are():
    assert {
        name: sum(math.prod(shape) for shape in parameter_shapes(architecture).values())
        for name, architecture in PRESETS.items()
    } == PARAMETERS

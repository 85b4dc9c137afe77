"""What a PyTorch job cannot train is refused with the field and the remedy, before anything starts where it can be known."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from learners.factories import trainer_of
from learners.job_check import findings
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.system.roots import EVERYTHING
from tests.learners.pytorch.small_models import (
    SMALL,
    own,
    saved,
    spec_of,
    torch,
    trained,
    transformers,
)


class Wrong:
    """Factories of modules that cannot train, each with what is said."""

    @staticmethod
    def not_causal() -> Any:
        module = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
        module.register_forward_hook(lambda _, __, logits: logits + logits.mean(1, keepdim=True))
        return module

    @staticmethod
    def hardly_causal() -> Any:
        """Its logits are small, as those of a new model, and 1 % of each comes from all tokens."""
        module = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256, bias=False))
        module[1].weight.data.mul_(0.01)
        module.register_forward_hook(lambda _, __, logits: logits + 0.04 * logits.mean(1, keepdim=True))
        return module

    @staticmethod
    def bfloat16() -> Any:
        return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)).bfloat16()

    @staticmethod
    def frozen() -> Any:
        return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)).requires_grad_(False)

    @staticmethod
    def headless() -> Any:
        return torch.nn.Flatten()

    @staticmethod
    def nothing() -> Any:
        return None


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("not_causal", "is not causal: the logits of a position change with later tokens"),
        ("hardly_causal", "is not causal: the logits of a position change with later tokens"),
        ("bfloat16", "0.weight is of torch.bfloat16, but parameters that train are merged and sent in float32"),
        ("frozen", "has no parameters that require a gradient"),
        ("headless", "has no parameters that require a gradient"),
        ("nothing", "returned NoneType; it must return a torch.nn.Module"),
    ],
)
def test_a_module_that_cannot_train_is_refused(mine: ModuleType, factory: str, said: str) -> None:
    vars(mine)["build"] = lambda spec: getattr(Wrong, factory)()
    with pytest.raises(ConfigurationError, match=f"^trainer.model.*{said}"):
        trainer_of(own({}), 0, 1)


def test_running_statistics_are_refused_before_the_first_step(mine: ModuleType) -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = (
                torch.nn.Embedding(256, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Linear(8, 256),
            )

        def forward(self, tokens: Any) -> Any:
            return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))

    vars(mine)["build"] = lambda spec: Normed()
    with pytest.raises(ConfigurationError, match=r"has the buffer norm\.running_mean, which training changes"):
        trainer_of(own({}), 0, 1).warm_up()


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"factory": "torch.optim:Adan"}, "cannot be imported .*no attribute 'Adan'"),
        ({"factory": "torch.optim:SGD", "weight_decay": 0.3}, "weight_decay is 0.3, but torch.optim:SGD gets only lr"),
        ({"factory": "torch.optim:SGD", "settings": {"speed": 1}}, "raises TypeError: .*speed"),
        ({"factory": "mine:optimizer", "groups": [{"role": "vector"}]}, "groups its parameters itself"),
        ({"factory": "mine:build"}, "raises TypeError"),
    ],
)
def test_an_optimizer_that_is_none_is_refused(mine: ModuleType, inner: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        trained(own(inner_optimizer=inner), 1)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"model": {"preset": "qwen3-20m"}}, "model.preset"),
        ({"model": {"remat": "dots"}}, "model.remat"),
        ({"inner_optimizer": {"kind": "lion"}}, "training.inner_optimizer.kind"),
        ({"islands": [{"node_group": "a", "hosts": 2}], "inner_optimizer": {"kind": "muon"}}, "islands.0.hosts"),
        ({"islands": [{"node_group": "a", "hosts": 2}], "evaluation": {"on": "islands"}}, "evaluation.on"),
        ({"islands": [{"node_group": "a", "hosts": 3}]}, "islands.0.hosts"),
        ({"islands": [{"node_group": "a", "hosts": 2, "accumulation": 4}]}, "islands.0.hosts"),
        ({"islands": [{"node_group": "a", "mesh": {"fsdp": 2}}]}, "islands.0.mesh"),
        ({"islands": [{"node_group": "a", "processes_per_host": 3}]}, "islands.0.processes_per_host"),
        ({"islands": [{"node_group": "a", "accelerator": "gpu", "accelerators": 2}]}, "islands.0.accelerators"),
    ],
)
def test_what_only_jax_has_is_refused_at_submission(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        own(**changes)
    assert [problem.path for problem in refused.value.problems] == [path]


def test_a_job_is_checked_without_a_cluster(tmp_path: Path, mine: ModuleType) -> None:
    found = findings(spec_of(saved(tmp_path / "model")).document | {"roots": EVERYTHING})
    assert (found["problems"], found["data"]["vocabulary_size"]) == ([], 256)
    assert found["model"]["parameters"] == 35_712
    vars(mine)["build"] = lambda spec: Wrong.not_causal()
    (problem,) = findings(own({}).document)["problems"]
    assert problem["path"] == "trainer.model"


class Ascending(torch.optim.SGD):
    """Adds the gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, maximize=True)


class Still(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "inner",
    [
        {"factory": "torch.optim:SGD", "settings": {"maximize": True}},
        {"factory": "torch.optim:AdamW", "settings": {"maximize": True}},
        {"factory": "mine:Ascending"},
    ],
    ids=lambda inner: str(inner["factory"]),
)
def test_an_optimizer_that_ascends_is_refused_by_check_and_at_its_first_step(
    mine: ModuleType, inner: dict[str, Any]
) -> None:
    vars(mine)["Ascending"] = Ascending
    said = (
        rf"^training\.inner_optimizer\.factory '{inner['factory']}' returns an optimizer that ascends: .* Leave out max"
    )
    with pytest.raises(ConfigurationError, match=said):
        trained(own(inner_optimizer=inner), 1)
    (problem,) = findings(own(inner_optimizer=inner).document | {"roots": EVERYTHING})["problems"]
    assert problem["path"] == "training.inner_optimizer.factory"
    assert "ascends" in problem["message"]
    descending = {**inner, "factory": "torch.optim:SGD", "settings": {"momentum": 0.9}}
    trainer, found = trained(own(inner_optimizer=descending), 8), findings(own(inner_optimizer=descending).document)
    assert found["problems"] == []
    other = trained(own(inner_optimizer=descending), 1)
    other.import_state(trainer.export_state().arrays())
    other.step(8)


def test_an_optimizer_that_changes_nothing_is_refused_within_half_of_the_job(mine: ModuleType) -> None:
    vars(mine)["Still"] = Still
    with pytest.raises(
        ConfigurationError, match=r"did not change the parameters in 21 steps\. Return one that changes"
    ):
        trained(own(inner_optimizer={"factory": "mine:Still"}), 40)


def test_a_check_of_an_optimizer_leaves_the_parameters_as_they_were(mine: ModuleType) -> None:
    trainer = trainer_of(own(inner_optimizer={"factory": "torch.optim:NAdam"}), 0, 1)
    before = trainer.snapshot(trainer.tensor_shapes()).arrays()
    trainer.trace()
    after = trainer.snapshot(trainer.tensor_shapes()).arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.update({"score.weight": torch.ones(2, 32)}),
            r"would drop: score\.weight\. Correct config",
        ),
        (
            lambda tensors: tensors.update({"transformer.h.9.ln_1.weight": torch.ones(32)}),
            r"would drop: transformer\.h\.9\.ln_1\.weight",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 0.5}),
            r"lm_head\.weight differs from the embeddings.* set tie_word_embeddings to false",
        ),
    ],
    ids=["another head", "another layer", "an untied head"],
)
def test_weights_that_the_model_would_drop_are_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    trainer_of(spec_of(folder), 0, 1)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=f"^trainer.model .*{said}"):
        trainer_of(spec_of(folder), 0, 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("BertForMaskedLM", "is a BertForMaskedLM, which has no causal head"),
        ("BertLMHeadModel", "is not causal: the logits of a position change with later tokens"),
        ("GPT2DoubleHeadsModel", "is a GPT2DoubleHeadsModel, which has no causal head"),
    ],
)
def test_a_folder_of_a_class_that_reads_later_tokens_or_predicts_something_else_is_refused(
    tmp_path: Path, kind: str, said: str
) -> None:
    model = getattr(transformers, kind)
    shape = (
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        if issubclass(model.config_class, transformers.BertConfig)
        else {"n_embd": 32, "n_layer": 2, "n_head": 2}
    )
    torch.manual_seed(3)
    model(model.config_class(**SMALL | shape)).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=f"^trainer.model.*{said}"):
        trainer_of(spec_of(tmp_path / "model"), 0, 1)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"has adapter_config\.json: a PEFT adapter\. Merge it"):
        trainer_of(spec_of(folder), 0, 1)

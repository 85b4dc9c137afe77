"""The shapes of models that people train, by the names of their published checkpoints. No weights: shapes are enough."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.parameters.pieces import Role, Shape


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer; ``norms`` vectors of its width in each layer."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    hidden: int
    tied: bool
    norms: int = 2
    normalises_queries: bool = True

    def layer(self) -> dict[str, Shape]:
        queries, keys = self.heads * self.head_size, self.key_heads * self.head_size
        shapes: dict[str, Shape] = {
            "self_attn.q_proj.weight": (queries, self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
            "mlp.gate_proj.weight": (self.hidden, self.width),
            "mlp.up_proj.weight": (self.hidden, self.width),
            "mlp.down_proj.weight": (self.width, self.hidden),
        }
        shapes |= {f"norm{index}.weight": (self.width,) for index in range(self.norms)}
        if self.normalises_queries:
            shapes |= {"self_attn.q_norm.weight": (self.head_size,), "self_attn.k_norm.weight": (self.head_size,)}
        return shapes

    def ends(self) -> dict[str, Shape]:
        embedding = (self.vocabulary, self.width)
        head = {} if self.tied else {"lm_head.weight": embedding}
        return {"model.embed_tokens.weight": embedding, "model.norm.weight": (self.width,), **head}

    def shapes(self) -> dict[str, Shape]:
        layers = {
            f"model.layers.{index}.{name}": shape
            for index in range(self.layers)
            for name, shape in self.layer().items()
        }
        return self.ends() | layers

    def scanned(self) -> tuple[dict[str, Shape], dict[str, Role]]:
        """All layers in one tensor for each of a layer's, as ``jax.lax.scan`` takes them."""
        stacked = {f"model.layers.{name}": (self.layers, *shape) for name, shape in self.layer().items()}
        return self.ends() | stacked, {name: Role(stacked_axes=1) for name in stacked}


LLAMA_8B = Decoder(128256, 4096, 32, 32, 8, 128, 14336, tied=False, normalises_queries=False)
MODELS = {
    "Qwen3-0.6B": Decoder(151936, 1024, 28, 16, 8, 128, 3072, tied=True).shapes(),
    "Qwen3-8B": Decoder(151936, 4096, 36, 32, 8, 128, 12288, tied=False).shapes(),
    "Llama-3.2-1B": Decoder(128256, 2048, 16, 32, 8, 64, 8192, tied=True, normalises_queries=False).shapes(),
    "Llama-3.1-8B": LLAMA_8B.shapes(),
    "Gemma-3-1B": Decoder(262144, 1152, 26, 4, 1, 256, 6912, tied=True, norms=4).shapes(),
    "Gemma-3-4B": Decoder(262208, 2560, 34, 8, 4, 256, 10240, tied=True, norms=4).shapes(),
    "Gemma-3-12B": Decoder(262208, 3840, 48, 16, 8, 256, 15360, tied=True, norms=4).shapes(),
}


def scanned_llama_8b() -> tuple[dict[str, Shape], dict[str, Role]]:
    return LLAMA_8B.scanned()

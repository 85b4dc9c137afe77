from orchestrator.parameters.kernels.twin import decode, encode, examine, gram, step

__all__ = ["CODECS", "INPUT_COUNT_MAX", "INSTRUCTIONS", "decode", "encode", "examine", "gram", "step"]

CODECS: dict[str, int]
INPUT_COUNT_MAX: int
INSTRUCTIONS: str

"""The parameters of a job, its tokenizer, and what it keeps of the checkpoint that it continues, to download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.http.pools import DOWNLOADS, chunks_in
from api.http.routing import runs_in
from api.http.streams import Stream
from api.jobs.parameters import Parameters
from api.jobs.tokenizer_check import PIECE_BYTES
from api.routes.dependencies import ServiceHere

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=runs_in(DOWNLOADS))
BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


async def parameters_of(request: Request) -> Parameters:
    parameters: Parameters = request.app.state.parameters
    return parameters


@router.get("/{job}/parameters", response_class=Stream, responses=BYTES)
def download_parameters(
    request: Request, job: str, parameters: Annotated[Parameters, Depends(parameters_of)]
) -> Stream:
    """The merged parameters as safetensors: those a job left, or as they stand while it runs.

    The file's metadata has the job's specification under `spec`, and of a running job the fragments' `versions`. 409 while
    there are none yet.
    """
    export = parameters.open(job)
    headers = {
        "Content-Disposition": f'attachment; filename="{export.job}.safetensors"',
        "Content-Length": str(export.bytes_count),
    }
    return Stream(request, chunks_in(DOWNLOADS, export.chunks()), "application/octet-stream", headers)


@router.get("/{job}/tokenizer", response_class=Stream, responses=BYTES)
def download_tokenizer(request: Request, job: str, service: ServiceHere) -> Stream:
    """The file of the job's tokenizer: a tokenizer.json, or SentencePiece's model.

    404 where the job's tokens are bytes; 409 where the run's folder has no copy of it, and the file is not what it was when
    the job was submitted.
    """
    file, size = service.tokenizer(job)
    headers = {"Content-Length": str(size)}
    return Stream(request, chunks_in(DOWNLOADS, _pieces(file)), "application/octet-stream", headers)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """All of the file, which is closed after."""
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@router.get("/{job}/origin", response_class=Response, responses=BYTES)
def download_origin(job: str, service: ServiceHere) -> Response:
    """What exports keep of the checkpoint that the job continues (`model.initial_weights`): its small files, as JSON.

    404 where the job began with parameters of its own; 409 where nothing was kept and the checkpoint is gone.
    """
    return Response(service.origin(job).content(), media_type="application/octet-stream")

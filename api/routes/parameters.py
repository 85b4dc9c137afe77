"""The parameters of a job, to download."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from api.jobs.parameters import Parameters

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


def parameters_of(request: Request) -> Parameters:
    parameters: Parameters = request.app.state.parameters
    return parameters


@router.get("/{job}/parameters", response_class=StreamingResponse, responses=BYTES)
def download_parameters(job: str, parameters: Annotated[Parameters, Depends(parameters_of)]) -> StreamingResponse:
    """The merged parameters as safetensors: those a job left, or as they stand while it runs.

    The file's metadata has the job's specification under `spec`, and of a running job the fragments' `versions`. 409 while
    there are none yet.
    """
    found = parameters.open(job)
    headers = {
        "Content-Disposition": f'attachment; filename="{found.job}.safetensors"',
        "Content-Length": str(found.bytes_count),
    }
    return StreamingResponse(found.chunks(), media_type="application/octet-stream", headers=headers)

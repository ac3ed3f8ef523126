"""Decides how an instance's bytes are counted by place and by sharers; pure."""

from collections.abc import Iterable

from dormouse.gpuserver.store.ingest.models import StoredModel
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.schemas.messages import AttachInstance, InstanceBytes


def instance_bytes(segments: Segments, models: Iterable[tuple[AttachInstance, StoredModel]]) -> list[InstanceBytes]:
    """The bytes of each instance. A segment counts for every instance that has it."""
    models = list(models)
    functions = {attach.instance: attach.function or attach.instance for attach, _ in models}  # by instance
    report: list[InstanceBytes] = []
    for attach, model in models:
        own = functions[attach.instance]
        host = filed = shared = 0
        others: set[str] = set()
        for segment in model.order:
            host += segment.nbytes if segment.span is not None else 0
            filed += segment.nbytes if segments.is_filed(segment) else 0
            names = {functions[holder] for holder in segment.holders if isinstance(holder, str) and holder in functions}
            names.discard(own)
            shared += segment.nbytes if names else 0
            others |= names
        report.append(
            InstanceBytes(
                instance=attach.instance,
                function=attach.function,
                nbytes=model.nbytes,
                host_nbytes=host,
                file_nbytes=filed,
                shared_nbytes=shared,
                shared_with=sorted(others),
            )
        )
    return report

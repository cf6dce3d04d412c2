"""``ingot import``: models of TorchServe and Triton, and plain ONNX files, into archives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot import permissions
from ingot.cli.archives.transfers import transferring
from ingot.cli.checks import check_apart, check_out, limited_load, note_stored
from ingot.cli.options import Json, LoadTimeout, StoreOption, with_options
from ingot.cli.output import note, print_json, progress, say, seconds, size
from ingot.errors import AlreadyExists, IngotError, InvalidArgument
from ingot.permissions import NAMES
from ingot.report.text import one_line

if TYPE_CHECKING:
    from ingot.importing import Candidate, Prove
    from ingot.model_store import Store


# The stages in which a model is read, PyTorch is imported, and an engine loads and runs the model.
_LOADING = 3


@dataclass(frozen=True)
class _Job:
    """One model and its target, a reference in the store or None for a file."""

    candidate: Candidate
    name: str
    target: str | None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Inputs and outputs that replace those of the source."""

    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="An input, such as image:float32\\[batch,3,224,224], instead of the source's; repeatable.",
        ),
    ] = None
    example: Annotated[
        str | None,
        typer.Option(help=".npz with example inputs by name, or package.module:attribute that holds or returns them."),
    ] = None
    output_names: Annotated[
        list[str] | None, typer.Option("--output-name", help="Name for an output; repeatable, in order.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Permission:
    """The code that may run, and the handler that may be left out."""

    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            envvar="INGOT_ALLOW_CODE",
            help="Run the model's code: its Python file or handler, TorchScript, or code in a .pt2 file.",
        ),
    ] = False
    without_handler: Annotated[
        bool,
        typer.Option("--without-handler", help="Import the model without its handler, whose work clients must do."),
    ] = False
    without_code: Annotated[
        bool,
        typer.Option(
            "--without-code",
            help="Make steps of a custom handler that has a known form; --prove compares their answers with it.",
        ),
    ] = False
    prove: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Requests for --without-code: what ingot serve --record wrote, or a row as JSON a line.",
        ),
    ] = None
    permit: Annotated[
        str | None,
        typer.Option(
            metavar="<permissions>",
            help=f"What a custom handler does, and servers must permit: {NAMES}; separated by commas.",
        ),
    ] = None


@with_options
def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            help="A .mar or .war file of TorchServe, SageMaker's model.tar.gz, MLflow's folder with MLmodel, an "
            ".onnx file, or a Triton folder: a repository, model or version."
        ),
    ],
    *,
    reference: Annotated[
        str | None,
        typer.Argument(help="The target: name:tag or name.", show_default="the source's own name and version"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The archive file to write, instead of the store.")
    ] = None,
    interface: Interface,
    permission: Permission,
    load_timeout: LoadTimeout = "5m",
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Import models from TorchServe, SageMaker, MLflow or Triton, each proved equal to its source.

    TorchServe's handlers image_classifier and image_segmenter become steps of the archive. Others are kept as they
    are: with --allow-code, the archive holds their code, which engine processes run. With --without-code, a custom
    handler becomes steps too, if its code has a known form and its answers to recorded requests are those of the
    steps. Server settings are not imported; notes list them.

    A workflow of TorchServe (.war) and an ensemble of Triton become pipelines, whose lines for ingot.toml are printed.
    The functions of a workflow become models.

    REFERENCE is the model's name in the store. Without it, or without a tag, the source's name and version are used, or
    the next version if the source has none. A single model whose version exists already is refused; of several models,
    those that exist are skipped. All models are tried, and the exit code is 1 if one failed.

    Examples:

        ingot import densenet161.mar densenet:1 --allow-code --input 'image:float32\\[batch,3,224,224]'
        ingot import model_repository
        ingot import model_repository/resnet/2 --out resnet.ingot
        ingot import pets.mar --allow-code --without-code --prove traffic/pets
    """
    from ingot.importing import Consent, candidates
    from ingot.model_store import Store

    if out is not None:
        if reference is not None:
            raise InvalidArgument("a model goes to the store or to a file; leave out the reference, or --out")
        check_out(out)
        check_apart(out, source=source)
    prove = _prove(permission)
    limit = seconds("--load-timeout", load_timeout)
    kept = Store(store)
    done: list[dict[str, Any]] = []
    failed: list[str] = []
    source = source.expanduser()
    consent = Consent(
        permission.allow_code,
        permission.without_handler,
        without_code=permission.without_code,
        described=bool(interface.inputs or interface.example),
        permissions=permissions.parsed(permission.permit),
    )
    with candidates(source, consent) as listed:
        pipelines = [item for item in listed if item.lines]
        found = [item for item in listed if not item.lines]
        if pipelines and (reference is not None or out is not None):
            raise InvalidArgument(
                f"{source} has a pipeline, whose lines are printed and name its models; leave out the reference and "
                "--out"
            )
        jobs, there = _plan(found, reference, out, kept)
        call = {
            "inputs": interface.inputs or (),
            "example_inputs": _example(interface.example),
            "output_names": interface.output_names or (),
            "prove": prove,
        }
        for target in there:
            note(f"{target} is already in the store and stays unchanged")
        for job in jobs:
            if len(jobs) > 1:
                note(f"{job.candidate.where}:")
            try:
                done.append(_import(job, kept, out, call, limit, note if pipelines else say, as_json=as_json))
            except IngotError as error:
                if len(jobs) == 1:
                    raise
                failed.append(f"{job.candidate.where}: {error}")
    lines = "\n".join(item.lines for item in pipelines)
    if as_json:
        print_json({"imported": done, "skipped": there, "failed": failed, "pipelines": lines})
    elif lines and not failed:
        print(lines)  # not through rich, which could break lines
    if failed:
        raise InvalidArgument(f"{len(failed)} of {len(jobs)} models were not imported. {' | '.join(failed)}")


def _prove(permission: Permission) -> Prove | None:
    """Return the comparison of a handler with the steps that it becomes; None if it stays as it is."""
    if permission.without_code != (permission.prove is not None):
        raise InvalidArgument("--without-code and --prove belong together: a handler is dropped only after a proof")
    if permission.prove is None:
        return None
    if permission.without_handler:
        raise InvalidArgument("--without-handler leaves the handler's work to clients, and --without-code makes steps")
    from ingot.cli.create.handler_proof import prove, recorded

    return partial(prove, recorded(permission.prove), permission.permit)


def _plan(
    found: Sequence[Candidate], reference: str | None, out: Path | None, store: Store
) -> tuple[list[_Job], list[str]]:
    """Return the models to import, and those of several that the store already has."""
    from ingot.model_store import Reference
    from ingot.model_store.references import written_name

    ref = None if reference is None else Reference.parse(reference)
    if ref is not None and (ref.digest or ref.variant):
        raise InvalidArgument(f"'{ref}' is not a target of copies; write name:tag, such as {ref.name}:1")
    if ref is not None and ref.registry is not None:
        raise InvalidArgument(f"'{ref}' is in a registry; import into the store, then: ingot copy NAME:TAG {ref}")
    if reference is not None:
        note_stored(written_name(reference))
    else:
        for called, name in dict.fromkeys((item.called, item.name) for item in found):
            if called not in ("", name):
                note(f"'{one_line(called)}' is stored as '{name}'")
    if len(found) > 1:
        _check_several(found, ref, out)
    if out is not None:
        return [_Job(found[0], found[0].name, None)], []
    jobs: list[_Job] = []
    there: list[str] = []
    taken: set[str] = set()
    for item in found:
        name = ref.name if ref is not None else item.name
        tag = (ref.tag if ref is not None else None) or item.version or store.next_version(name)
        target = _target(name, tag, item)
        if target in taken:
            raise InvalidArgument(
                f"two models of the source would both be {target}; import each with its own reference"
            )
        taken.add(target)
        if not _is_taken(target, store):
            jobs.append(_Job(item, name, target))
        elif len(found) > 1:
            there.append(target)
        else:
            raise AlreadyExists(
                f"'{target}' is in the store already, and a version never changes; import as another, such as "
                f"{name}:{store.next_version(name)}"
            )
    return jobs, there


def _check_several(found: Sequence[Candidate], ref: Any, out: Path | None) -> None:
    from ingot.importing.pipeline import places

    if out is not None or (ref is not None and ref.tag is not None):
        raise InvalidArgument(
            f"the source holds {len(found)} models, which cannot all have one target; name one: {places(found)}"
        )
    if ref is not None and len({item.name for item in found}) > 1:
        raise InvalidArgument(
            f"the models of the source have different names and cannot all be '{ref.name}'; name one of: "
            f"{places(found)}"
        )


def _target(name: str, tag: str, item: Candidate) -> str:
    from ingot.model_store import Reference

    try:
        return str(Reference.parse(f"{name}:{tag}"))
    except InvalidArgument as error:
        raise InvalidArgument(
            f"the version '{tag[:100]}' of {item.where} cannot be a tag; give the target, such as {name}:1"
        ) from error


def _is_taken(target: str, store: Store) -> bool:
    from ingot.model_store.references import is_version

    name, _, tag = target.partition(":")
    return is_version(tag) and tag in store.tags(name)


def _example(text: str | None) -> Any:
    if text is None:  # without importing PyTorch
        return None
    from ingot.export.source import load_example

    return load_example(text)


def _import(
    job: _Job,
    store: Store,
    out: Path | None,
    call: dict[str, Any],
    limit: float,
    tell: Callable[[str], None],
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Import one model and report it."""
    from ingot.importing import convert

    where = job.candidate.where
    with progress(f"Reading {where}", timed=True) as step, limited_load(limit, where, step, _LOADING) as limited:
        archive = convert(job.candidate, name=job.name, progress=limited, **call)
    with transferring("Writing") as transfer:
        if out is not None:
            archive.save(out, transfer)
        else:
            store.push(archive, str(job.target), transfer=transfer)
    variant = archive.variant()
    notes = variant.serving.provenance.notes
    if not as_json:
        if (steps := variant.serving.steps) is not None:
            from ingot.cli.archives.steps import described

            for title, line in described(steps, variant.serving.evidence.steps):
                note(f"  {title:8} {line}")
        for parity in variant.serving.evidence.parity:
            note(f"{parity.tensor}: equals the original in {parity.cases} cases, largest error {parity.error:.1e}")
        for remark in notes:
            if not remark.startswith("captured by torch.export, torch"):
                note(f"note: {remark}")
        tell(
            f"{job.target or out}  {archive.digest}" if out is None else f"{out}: {archive.name}, {size(variant.size)}"
        )
    return {
        "source": job.candidate.where,
        "reference": job.target,
        "file": None if out is None else str(out),
        "digest": archive.digest,
        "notes": list(notes),
    }

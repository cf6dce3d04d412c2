"""``ingot export``: from a model to an archive."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot import permissions
from ingot.cli.archives.inspect import describe
from ingot.cli.archives.transfers import transferring
from ingot.cli.checks import check_out, limited_load, note_stored
from ingot.cli.create.export_options import Code, Conversion, Diagnosis, Interface, Original, Serving
from ingot.cli.options import Json, with_options
from ingot.cli.output import note, print_json, progress, say, seconds, size
from ingot.errors import ExportError, IngotError, InvalidArgument
from ingot.tasks import GENERATING, ON_TEXTS

if TYPE_CHECKING:
    from ingot.export.estimate.plan import Estimate
    from ingot.export.tasks import Found
    from ingot.model_store import Archive
    from ingot.steps import Described

# The oldest that ONNX Runtime runs.
_OLDEST_OPSET = 7
_NOT_CAPTURED = (
    "{source} is a class in Python, which is run as it is: its export takes --out, --name, --requirements, --wheels, "
    "--include, --permit and --load-timeout. If it is a module of PyTorch to be captured as a graph, write its import "
    "path: {stem}:{name}"
)


@with_options
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="package.module:attribute (module, class or factory), a .onnx, TorchScript .pt or ExportedProgram "
            ".pt2 file, the folder of a transformers model, folder:entry of a hubconf.py, or a class in Python with "
            "predict (model.py:Model)."
        ),
    ],
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The archive file to write.")] = None,
    original: Original,
    interface: Interface,
    conversion: Conversion,
    serving: Serving,
    code: Code,
    diagnosis: Diagnosis,
    as_json: Json = False,
) -> None:
    """Capture a model as an ONNX graph, prove that it equals the original, and write an archive.

    Named dimensions of an input are dynamic: image:float32\\[batch,3,224,224]; batch is the batch dimension.
    A dimension may state its range: ids:int64\\[batch,seq=1..512], or height=64..512:32 for multiples of 32.
    So may the values: n:int64\\[]=0..4096. The server refuses other values.
    Inputs inside dicts and tuples are named by their path: batch.image, past.0.1.

    Examples:

        ingot export my_models:Net --checkpoint net.pth --input 'image:float32\\[batch,3,224,224]' -o net.ingot
        ingot export my_models:Net --input 'x:float32\\[batch,8]' --plan
        ingot export my_models:Net --input 'x:float32\\[batch,8]' --explain
    """
    from ingot.model_store.places import python_class

    if out is not None:
        check_out(out)
    elif not (diagnosis.plan or diagnosis.bisect or diagnosis.explain):
        raise InvalidArgument("the archive needs a file; give --out FILE")
    if not (math.isfinite(diagnosis.explain_limit) and diagnosis.explain_limit > 0):
        raise InvalidArgument(f"--explain-limit is {diagnosis.explain_limit:g}; it must be a number of seconds above 0")
    if interface.name is not None:
        note_stored(interface.name)
    if (found_class := python_class(source)) is not None:
        others = (original, conversion, serving, replace(diagnosis, load_timeout=Diagnosis.load_timeout))
        if others != (Original(), Conversion(), Serving(), Diagnosis()) or interface != Interface(name=interface.name):
            raise InvalidArgument(_NOT_CAPTURED.format(source=source, stem=found_class[0].stem, name=found_class[1]))
        _export_class(source, out, interface.name, code, diagnosis, as_json=as_json)
        return
    if code != Code():
        options = "--requirements, --wheels, --include and --permit"
        raise InvalidArgument(f"{options} are for a class in Python (model.py:Model), not for {source}")
    made = _export_model(source, original, interface, conversion, serving, diagnosis, as_json=as_json)
    if made is None:
        return
    archive, why = made
    if out is not None:  # --explain needs no file
        with transferring(f"Writing {out.name}") as transfer:
            archive.save(out, transfer)
    if as_json:
        print_json(describe(archive))
        return
    from ingot.cli.create.export_output import print_archive

    print_archive(archive, out, why)


def _export_model(
    source: str,
    original: Original,
    interface: Interface,
    conversion: Conversion,
    serving: Serving,
    diagnosis: Diagnosis,
    *,
    as_json: bool,
) -> tuple[Archive, str] | None:
    """Return the archive of a model, and how its task was found; None after --plan and --bisect, which print."""
    limit = seconds("--load-timeout", diagnosis.load_timeout) if source.endswith(".onnx") else 0
    fixed = _constants(original.constants or [])
    inputs, opset, batch_dim = original.inputs or (), conversion.opset, interface.batch_dim
    with progress("Importing PyTorch", timed=True) as step, limited_load(limit, source, step) as limited:
        from ingot.export import export_model
        from ingot.export.source import load_example
        from ingot.export.source.tensor_plan import AUTO, read_plan

        defaults = serving.defaults()
        _check_opset(opset)
        parallel = conversion.tensor_parallel
        division = parallel if parallel in (None, AUTO) else read_plan(Path(parallel))
        given = load_example(original.example)
        if diagnosis.plan:
            _print(_plan(original.maker(source), inputs, given, fixed, batch_dim, opset), as_json)
            return None
        found = original.found(source)
        why = "" if found is None else found.why
        if original.greedy and (found is None or found.task not in GENERATING[1:]):
            raise InvalidArgument(
                "--greedy is for encoder-decoders whose generation_config has a beam search; leave it out"
            )
        if found is not None and found.task in GENERATING:
            if _decoder_alone(original, interface, conversion, serving, diagnosis):
                from ingot.export.decoder.pipeline import export_decoder

                name = interface.name or _name(source)
                options: dict[str, Any] = {"allow_code": original.allow_code, "greedy": original.greedy}
                return export_decoder(source, name=name, task=found.task, progress=step, **options), why
            found = None
        model = original.model(source if found is None else str(found.folder))
        described = None if diagnosis.bisect else original.described(found, model)
        call: dict[str, Any] = {
            "inputs": inputs,
            "constants": fixed,
            "opset": opset,
            "output_names": interface.output_names or (),
            "capture": conversion.capture,
            "lift_state": conversion.lift_state,
            "progress": limited,
        }
        if diagnosis.bisect:
            _bisect(model, given, call, as_json)
            return None
        try:
            archive = export_model(
                model,
                given,
                name=interface.name or _name(source),
                batch_dim=batch_dim,
                independent=interface.independent,
                rewrite=conversion.rules or "default",
                target=conversion.target,
                partition=conversion.partition,
                device=conversion.device,
                pad=interface.pad or (_padding(found, described) if found is not None and not inputs else ()),
                tensor_parallel=division,
                serving=defaults,
                steps=described,
                source=source,
                **call,
            )
        except ExportError as error:
            if diagnosis.explain:
                step(f"Searching for all obstacles, {diagnosis.explain_limit:.0f} s at most")
                _explain(error, diagnosis.explain_limit, source, original, fixed)
            raise
    return archive, "" if found is None else why


def _export_class(
    source: str, out: Path | None, name: str | None, code: Code, diagnosis: Diagnosis, *, as_json: bool
) -> None:
    """Write the archive of a class in Python."""
    from ingot.export.python_model import export_class

    limit = seconds("--load-timeout", diagnosis.load_timeout)
    with progress(f"Running {source} and its archive", timed=True):
        archive = export_class(
            source,
            name=name or _name(source),
            requirements=code.requirements,
            wheels=code.wheels,
            include=code.include or (),
            permissions=permissions.parsed(code.permit),
            load_timeout=limit or None,
        )
    if out is not None:
        archive.save(out)
    if as_json:
        print_json(describe(archive))
        return
    variant = archive.variant()
    for parity in variant.serving.evidence.parity:
        note(f"{parity.tensor}: the archive answers the example as the file does, error {parity.error:.1e}")
    if not variant.serving.evidence.parity:
        note("note: without a method example() there is no golden, so servers cannot check what the model computes")
    note("it is code: ingot serve loads it with --allow-code, or by a rule of a trust policy")
    say(f"{out}: {archive.name}, {variant.name}, {size(variant.size)}")


def _decoder_alone(
    original: Original, interface: Interface, conversion: Conversion, serving: Serving, diagnosis: Diagnosis
) -> bool:
    """Return whether the options are those of a decoder; others are for its graph without a cache.

    Raises:
        InvalidArgument: they are not, and the task is named.
    """
    given = replace(original, task="auto", allow_code=False, greedy=False), replace(interface, name=None)
    if (*given, conversion, serving, diagnosis) == (Original(), Interface(), Conversion(), Serving(), Diagnosis()):
        return True
    why = "a decoder with its cache is exported with --out, --name, --greedy and --allow-code only"
    if original.task != "auto":
        raise InvalidArgument(f"{why}; leave the other options out, or export its graph alone (--task none)")
    note(f"note: the graph alone, without a cache, as by --task none: {why}")
    return False


def _padding(found: Found, described: Described | None) -> str | tuple[()]:
    """Return the padding along which requests of texts of different lengths share a batch; none for other tasks."""
    if found.task not in ON_TEXTS:
        return ()
    [step] = described.steps.before[:1] if described is not None else [None]
    pad_id = getattr(step, "pad_id", 0)
    return f"seq:input_ids={pad_id}" if pad_id else "seq"


def _check_opset(opset: int | None) -> None:
    if opset is None:
        return
    from onnx.defs import onnx_opset_version

    newest = onnx_opset_version()
    if not _OLDEST_OPSET <= opset <= newest:
        raise InvalidArgument(f"cannot export to operator set {opset}; give --opset from {_OLDEST_OPSET} to {newest}")


def _plan(
    load: Callable[[], Any],
    inputs: Sequence[str],
    given: Any,
    constants: dict[str, Any],
    batch_dim: str | None,
    opset: int | None,
) -> Estimate:
    from ingot.export.estimate.plan import plan

    return plan(load, given, inputs=inputs, constants=constants, batch_dim=batch_dim, opset=opset)


def _print(planned: Estimate, as_json: bool) -> None:
    from ingot.export.estimate.plan import lines

    if as_json:
        print_json(asdict(planned))
        return
    for line in lines(planned):
        say(line)


def _bisect(model: Any, given: Any, call: dict[str, Any], as_json: bool) -> None:
    from ingot.export.diagnose.bisection import bisect_model

    if not hasattr(model, "forward"):
        raise InvalidArgument("an .onnx file is used unchanged: there is nothing to compare it with")
    departure, cases = bisect_model(model, given, **call)
    if as_json:
        print_json({"departure": asdict(departure) if departure else None, "cases": cases})
    elif departure is None:
        say(f"no operation differs from the original's, at {cases} sizes")
    else:
        say(departure.text())
    if departure is not None:
        raise typer.Exit(1)


def _explain(error: ExportError, limit: float, source: str, original: Original, constants: dict[str, Any]) -> None:
    """Add the findings of a deeper search to an error."""
    from ingot.export.diagnose.deep import Recipe, explain_deep

    recipe = Recipe(
        source=source,
        inputs=tuple(original.inputs or ()),
        constants=constants,
        checkpoint=None if original.checkpoint is None else str(original.checkpoint),
        map_location=original.map_location,
        allow_code=original.allow_code,
        example=original.example,
    )
    try:
        found = explain_deep(recipe, limit)
    except IngotError as failure:
        note(f"--explain: {failure}")
        return
    error.detail = "\n\n".join(item.text() for item in found) or error.detail


def _name(source: str) -> str:
    from ingot.model_store.references import name_from

    return name_from(source.rpartition(":")[2] if ":" in source else Path(source).stem)


def _constants(items: list[str]) -> dict[str, Any]:
    """Parse ``name=value``: the value is JSON if it parses, otherwise text."""
    constants: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"'{item}' is not a constant; write name=value, such as use_cache=false")
        try:
            constants[name] = json.loads(value)
        except ValueError:
            constants[name] = value
    return constants

"""``ingot export``: from a model to an archive."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot import permissions
from ingot.cli.archives import Json, LoadTimeout, check_out, describe, limited_load, note_stored
from ingot.cli.options import with_options
from ingot.cli.output import note, print_json, progress, say, seconds, size
from ingot.cli.transfers import transferring
from ingot.errors import ExportError, IngotError, InvalidArgument, Unsupported
from ingot.permissions import NAMES
from ingot.tasks import ON_TEXTS, Task

if TYPE_CHECKING:
    from ingot.export.estimate.plan import Estimate
    from ingot.export.tasks import Found
    from ingot.model_store import Archive, ServingDefaults
    from ingot.steps import Described

# As in ingot.export.pipeline, which imports more than --help needs.
Target = Literal["onnx", "aoti", "pt2"]
Device = Literal["cpu", "cuda"]
_CAPTURE = "Capture route: auto, export, strict, inferred, deferred, oblivious, crossed, fx, script or trace."
# The oldest that ONNX Runtime runs.
_OLDEST_OPSET = 7
_NOT_CAPTURED = (
    "{source} is a class in Python, which is run as it is: its export takes --out, --name, --requirements, --wheels, "
    "--include, --permit and --load-timeout. If it is a module of PyTorch to be captured as a graph, write its import "
    "path: {stem}:{name}"
)
_RULES = "Rewrite rule, or default, all or none; repeatable."


@dataclass(frozen=True, kw_only=True)
class Original:
    """The model and its inputs."""

    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="An input, such as image:float32\\[batch,3,224,224]; repeatable."),
    ] = None
    example: Annotated[
        str | None,
        typer.Option(help=".npz with example inputs by name, or package.module:attribute that holds or returns them."),
    ] = None
    constants: Annotated[
        list[str] | None,
        typer.Option("--constant", help="A constant keyword argument of forward, such as use_cache=false; repeatable."),
    ] = None
    checkpoint: Annotated[Path | None, typer.Option(help="File with the module's state_dict.")] = None
    map_location: Annotated[str, typer.Option(help="Device to load the checkpoint's tensors to.")] = "cpu"
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            envvar="INGOT_ALLOW_CODE",
            help="Run the code in a .pt2 file or a transformers folder.",
        ),
    ] = False

    task: Annotated[
        Task,
        typer.Option(
            help="What a transformers folder is for: auto finds it from config.json and modules.json, none stores the "
            "graph without its tokenizer and labels."
        ),
    ] = "auto"
    steps: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Steps before and after your own model: a TOML file that declares them, or a folder with config.json "
            "and a tokenizer or processor.",
        ),
    ] = None

    def found(self, source: str) -> Found | None:
        """Return the task of a folder of transformers or sentence-transformers, for which steps are known.

        None is returned for other sources, for a folder without such a task, and if ``--steps`` states the steps.

        Raises:
            InvalidArgument: ``--task`` does not fit the source.
        """
        from ingot.export import tasks

        folder = Path(source).expanduser()
        if self.steps is not None and self.steps.is_dir():
            return None  # the task of that folder is that of another model
        if self.steps is not None or (
            not (folder / "config.json").is_file() and not (folder / "modules.json").is_file()
        ):
            if self.task not in ("auto", "none"):
                raise InvalidArgument(
                    f"--task is for folders of transformers and sentence-transformers; {source} is something else: "
                    "give --steps a folder with its tokenizer or processor"
                )
            return None
        return tasks.find(folder, self.task)

    def described(self, found: Found | None, model: Any) -> Described | None:
        """Return the steps of ``--steps``, or those of a folder's task; None if there are none.

        A task that was found by itself, and whose steps cannot be described, is only noted: the archive then accepts
        tensors alone.

        Raises:
            InvalidArgument: the steps are not valid.
            Unsupported: the steps cannot be described, and the user named the task or states no inputs.
        """
        from ingot.steps.tasks.declared import read_steps

        if self.steps is not None and self.steps.is_dir():
            from ingot.export import tasks

            return tasks.of_folder(self.steps, self.task)
        if self.steps is not None:
            return read_steps(self.steps)
        if found is None:
            return None
        from ingot.export.source import defaults

        try:
            return found.describe(model)
        except Unsupported as error:
            if self.task != "auto":
                raise
            if not (self.inputs or self.example or defaults.of(model).inputs):
                raise Unsupported(
                    f"{error}; without these steps the sizes of the inputs are not known: or declare them with --input"
                ) from error
            note(f"note: the archive accepts tensors alone: {error}")
            return None

    def model(self, source: str) -> Any:
        """Return the model; see :func:`ingot.export.load_source` for the errors."""
        from ingot.export import load_source

        return load_source(
            source,
            self.checkpoint,
            self.map_location,
            allow_code=self.allow_code,
            remark=lambda text: note(f"note: {text}"),
        )

    def maker(self, source: str) -> Callable[[], Any]:
        """Return a function that creates the model without its checkpoint.

        The model's code is imported here, so that only the creation runs on fake tensors or the meta device.
        """
        from ingot.export import load_source
        from ingot.export.source import imported, names_code

        if not names_code(source):
            return partial(load_source, source, None, self.map_location, allow_code=self.allow_code)
        return partial(imported.make, imported.find(source), source.partition(":")[2])


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Names and dimensions of the archive."""

    name: Annotated[
        str | None, typer.Option(help="The archive's name.", show_default="the attribute, or the file's stem")
    ] = None
    output_names: Annotated[
        list[str] | None, typer.Option("--output-name", help="Name for an output; repeatable, in order.")
    ] = None
    batch_dim: Annotated[
        str | None, typer.Option(help="The dimension along which requests are batched.", show_default="batch")
    ] = None
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Promise that samples of a batch never influence each other, where the graph does not prove it.",
        ),
    ] = False
    pad: Annotated[
        list[str] | None,
        typer.Option(help="A dimension that the server may pad, such as seq, or seq:ids=1@64,128; repeatable."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How the graph is captured, and what it becomes."""

    opset: Annotated[int | None, typer.Option(help="ONNX operator set.", show_default="the exporter's")] = None
    capture: Annotated[str, typer.Option(help=_CAPTURE)] = "auto"
    rules: Annotated[list[str] | None, typer.Option("--rule", help=_RULES, show_default="default")] = None
    lift_state: Annotated[
        bool, typer.Option("--lift-state", help="Turn state that the model changes into inputs and outputs.")
    ] = False
    target: Annotated[
        Target, typer.Option("--to", help="onnx, aoti (an AOTInductor package) or pt2 (an exported program).")
    ] = "onnx"
    partition: Annotated[
        bool,
        typer.Option(
            "--partition", help="Run the parts that ONNX cannot express in PyTorch, the rest in ONNX Runtime."
        ),
    ] = False
    tensor_parallel: Annotated[
        str | None,
        typer.Option(
            "--tensor-parallel",
            metavar="FILE|auto",
            help="How layers of a pt2 program may be divided over GPUs: a JSON file, or auto for the model's own plan.",
        ),
    ] = None
    device: Annotated[Device, typer.Option(help="The device of an AOTInductor package: cpu or cuda.")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Settings of a server that the archive records."""

    labels: Annotated[
        Path | None, typer.Option(help="File with the names of classes, a line for each or JSON, for the server.")
    ] = None
    states: Annotated[
        str | None, typer.Option(help="Inputs that the server keeps for sequences: h=h_next,c=c_next.")
    ] = None
    repeat: Annotated[
        str | None, typer.Option(help="Inputs from outputs with which the server runs the model again: ids=next_ids.")
    ] = None
    repeat_until: Annotated[
        str | None, typer.Option(help="The BOOL output that is true in the last answer, with --repeat.")
    ] = None

    def defaults(self) -> ServingDefaults | None:
        """Return the settings; see :func:`~ingot.runtime.loading.defaults.parse_defaults` for the errors."""
        from ingot.runtime.loading.defaults import parse_defaults

        return parse_defaults(self.labels, self.states, self.repeat, self.repeat_until)


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a class in Python needs in its archive."""

    requirements: Annotated[
        Path | None,
        typer.Option(help="For a class in Python: a file with the versions of packages that it needs, name==version."),
    ] = None
    wheels: Annotated[
        Path | None,
        typer.Option(
            help="For a class in Python: a folder with the wheels of --requirements, which the archive holds."
        ),
    ] = None
    permit: Annotated[
        str | None,
        typer.Option(
            metavar="<permissions>",
            help=f"For a class in Python: what it does, and servers must permit: {NAMES}; separated by commas.",
        ),
    ] = None
    include: Annotated[
        list[Path] | None,
        typer.Option(help="For a class in Python: a file or folder next to it that it reads or imports; repeatable."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Work in place of an export, and time limits."""

    plan: Annotated[
        bool,
        typer.Option("--plan", help="Estimate the model's cost and which routes can capture it, without its weights."),
    ] = False
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find the first operation whose result differs from the original's.")
    ] = False
    explain: Annotated[
        bool, typer.Option("--explain", help="If the model cannot be captured, search for all obstacles.")
    ] = False
    load_timeout: LoadTimeout = "5m"
    explain_limit: Annotated[float, typer.Option(help="Time limit of --explain in seconds.")] = 120.0


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
    limit = seconds("--load-timeout", diagnosis.load_timeout) if source.endswith(".onnx") else 0
    fixed = _constants(original.constants or [])
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
            return
        found = original.found(source)
        if found is not None and found.task == "text-generation":
            found = found if _decoder_alone(original, interface, conversion, serving, diagnosis) else None
        if found is not None and found.task == "text-generation":
            from ingot.export.decoder.pipeline import export_decoder

            name = interface.name or _name(source)
            archive = export_decoder(source, name=name, allow_code=original.allow_code, progress=step)
        else:
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
                return
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
    if out is not None:  # always, after --plan and --bisect
        with transferring(f"Writing {out.name}") as transfer:
            archive.save(out, transfer)
    if as_json:
        print_json(describe(archive))
    else:
        _show(archive, out, "" if found is None else found.why)


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
    given = replace(original, task="auto", allow_code=False), replace(interface, name=None)
    if (*given, conversion, serving, diagnosis) == (Original(), Interface(), Conversion(), Serving(), Diagnosis()):
        return True
    why = "a decoder with its cache is exported with --out, --name and --allow-code only"
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


def _show(archive: Archive, out: Path | None, why: str) -> None:
    variant = archive.variant()
    if (generation := variant.serving.generation) is not None:
        from ingot.cli.steps import generating

        for title, line in generating(generation, variant.serving.evidence):
            note(f"  {title:14} {line}")
    if (steps := variant.serving.steps) is not None:
        note(f"  {'task':14} {steps.task}{f' ({why})' if why else ''}")
        chain = " -> ".join((*(step.kind for step in steps.before), "graph", *(step.kind for step in steps.after)))
        proof = variant.serving.evidence.steps
        if proof is not None:
            kind = {"tokenize": "texts", "audio": "sounds", "bytes": "files"}.get(steps.before[0].kind, "pictures")
            if kind == "texts":
                kind += " and pairs" if any(spec.name == "text_pair" for spec in steps.inputs) else ""
                note(f"  {'tokenizer':14} the loaded tokenizer stored; {proof.items} hard {kind}: ids equal")
            else:
                equal = f"equal within {proof.deviation:.0e}" if proof.deviation else "equal to the bit"
                note(f"  {'processor':14} {proof.reference}; values of {proof.items} hard {kind}: {equal}")
            close = f" within {proof.error:.0e}" if proof.error else ""
            if any(step.kind in ("masks", "segments") for step in steps.after):
                close = f" but for {proof.error:.0e} of their pixels" if proof.error else " to the pixel"
            if proof.answers:
                chain += f"; answers of {proof.answers} {kind} equal to {proof.reference}'s{close}"
        note(f"  {'steps':14} {chain}")
    for parity in variant.serving.evidence.parity:
        note(
            f"{parity.tensor}: equals the original in {parity.cases} cases, "
            f"largest error {parity.error:.1e} (tolerance {parity.tolerance:.0e})"
        )
    for remark in variant.serving.provenance.notes:
        if not remark.startswith("captured by torch.export, torch"):
            note(f"note: {remark}")
    bounds = variant.serving.evidence.bounds
    for reason in bounds.reasons[:3] if bounds is not None else ():
        note(f"not bounded by the sizes of its inputs, so it is served in an engine process: {reason}")
    say(f"{out}: {archive.name}, {variant.name}, {size(variant.size)}")

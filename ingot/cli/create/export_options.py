"""The options of ``ingot export``, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli.options import LoadTimeout
from ingot.cli.output import note
from ingot.errors import InvalidArgument, Unsupported
from ingot.permissions import NAMES
from ingot.tasks import Task

if TYPE_CHECKING:
    from ingot.export.tasks import Found
    from ingot.model_store import ServingDefaults
    from ingot.steps import Described

# As in ingot.export.pipeline, which imports more than --help needs.
Target = Literal["onnx", "aoti", "pt2"]
Device = Literal["cpu", "cuda"]
_CAPTURE = "Capture route: auto, export, strict, inferred, deferred, oblivious, crossed, fx, script or trace."
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
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy",
            help="Take the most likely token at each place, in an encoder-decoder whose generation_config asks for a "
            "beam search, which servers do not do.",
        ),
    ] = False
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

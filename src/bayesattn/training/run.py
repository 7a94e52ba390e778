"""Follow a recipe on `transformers.Trainer`: any number of devices, logging, checkpoints, exact resumption."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from bayesattn.data.contexts import Contexts, StreamedContexts, encode_stream
from bayesattn.data.text import documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import NotFiniteError, UserError, first_line, one_line, shown
from bayesattn.files import content_of, is_main_process, write_whole
from bayesattn.interrupts import Interrupted, deferred, keeps
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.models.loading import CAUSAL_MODELS, load_config, load_weights
from bayesattn.training.augmentation import BatchPart, augmented
from bayesattn.training.callbacks import (
    COMPLETE,
    EVAL_TRIALS,
    RetrievalCallback,
    RunLogCallback,
    checkpoint_hint,
    newest_checkpoint,
)
from bayesattn.training.card import card
from bayesattn.training.memory import check_memory
from bayesattn.training.optimizers import make_optimizer, make_schedule
from bayesattn.training.plain_values import read_yaml
from bayesattn.training.processes import connect, is_lost_process
from bayesattn.training.recipe import Recipe, RecipeError, parse_recipe
from bayesattn.training.resumption import RunStopped, StopCallback
from bayesattn.training.trainer import ContextTrainer, TrainingStoppedError, stack_contexts

# Hash of the training text; empty for a stream.
SOURCE_HASH = "source.sha256"
# Positions of contexts in a stream.
STREAM_PLACES = "places.jsonl"
# Written last into a finished model.
CARD = "README.md"
# The model while it is written, and one that it replaces.
PARTIAL_MODEL, OLD_MODEL = "model.partial", "model.old"
# Modules that a model may have and the one it starts from not: in any case, and with another position.
NEW_ENCODER, NEW_POSITION = "delay_encoder", ("own_prior", "shared_prior", "temperature")
# Parts of the messages of a full disk, from the system and from torch.
FULL_DISK = ("No space left", "quota exceeded", "File too large", "PytorchStreamWriter", "unexpected pos")
# Parts of the messages of memory that is used up, of the processor's and of GPUs.
FULL_MEMORY = ("can't allocate memory", "out of memory")


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    report_to: str = "none",
    eval_trials: Mapping[int, int] = EVAL_TRIALS,
) -> Path:
    """Train, writing checkpoints to `out`; returns the folder of the final model, `out`/model.

    Args:
        recipe: what to train, on what, and how.
        out: folder of the run.
        resume: continue from the newest complete checkpoint, as if the run had never stopped.
        report_to: where the Trainer reports its progress.
        eval_trials: trials of each evaluation, by multiples of the training length.
    """
    if report_to not in (integrations := ("none", "all", *get_available_reporting_integrations())):
        raise UserError(
            f"report_to is {report_to!r}; {', '.join(integrations)} are available here, others when their packages are "
            "installed"
        )
    with keeps(lambda: checkpoint_hint(out)):
        return _train(recipe, out, resume, report_to, eval_trials)


def _train(recipe: Recipe, out: Path, resume: bool, report_to: str, eval_trials: Mapping[int, int]) -> Path:
    processes = connect()
    run_log = RunLogCallback(out)
    newest = newest_checkpoint(out)
    source_hash = _check_recipe(recipe, out, resume, newest)
    resumed = newest if resume else None
    if resume and resumed is None and processes.is_main_process:
        tqdm.write(f"{out} has no checkpoint to resume from; training starts from step 0")
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    retrieval = RetrievalCallback(recipe, tokenizer, eval_trials)
    config = configuration(recipe, tokenizer)
    settings = recipe.training
    device_batch, accumulation = split_batch(recipe, processes.num_processes)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(config).parameters())
    check_memory(parameters, config, device_batch * recipe.data.context)
    torch.manual_seed(recipe.seed)
    model = build_model(config)
    if recipe.start and resumed is None:
        _start_from(recipe.start, model)
    done = int(resumed.name.rpartition("-")[2]) if resumed else 0
    contexts = _contexts(recipe, tokenizer, out, first=done * settings.batch)
    freeze(model, settings.freeze)
    optimizer = make_optimizer(model, settings)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=settings.last_step,
        per_device_train_batch_size=device_batch,
        gradient_accumulation_steps=accumulation,
        ignore_data_skip=recipe.data.stream,  # a stream skips to its start by itself
        max_grad_norm=settings.clip,
        logging_steps=25,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 1,
        save_total_limit=2,
        eval_strategy="no",
        bf16=settings.precision == "bf16",
        seed=recipe.seed,
        report_to=report_to,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=False,
    )
    arguments.mixed_precision = "bf16" if arguments.bf16 else "no"  # not what accelerate launch is configured for
    if arguments.n_gpu > 1:
        raise UserError(
            f"there are {arguments.n_gpu} GPUs; start with `accelerate launch -m bayesattn.cli train …`, or let it see "
            "one of them with CUDA_VISIBLE_DEVICES=0"
        )
    with _named_errors(out):
        _begin(recipe, out, source_hash, fresh=resumed is None)
    trainer = ContextTrainer(
        model=model,
        args=arguments,
        train_dataset=contexts,
        optimizers=(optimizer, make_schedule(optimizer, settings)),
        callbacks=[run_log, retrieval],
        data_collator=stack_contexts,
    )
    retrieval.trainer = trainer
    trainer.batch_part = BatchPart()
    trainer.resumed = str(resumed) if resumed else None
    try:
        with _named_errors(out):
            if done < settings.last_step:
                _run_steps(trainer, recipe)
            else:  # all that is left to do is to write the model
                trainer.load_end(Path(str(resumed)))
                trainer.resumed = None
                if trainer.is_world_process_zero() and not run_log.resume(done):
                    trainer.log_end()
            if trainer.is_world_process_zero():
                _write_model(trainer, recipe, tokenizer, out, run_log.seconds / 60)
        processes.wait_for_everyone()  # no process returns before the model is there
    except NotFiniteError as problem:
        raise TrainingStoppedError(one_line(f"training diverged: {problem}; {checkpoint_hint(out)}")) from problem
    except UserError:
        raise
    except Exception as problem:
        if any(sign in str(problem) for sign in FULL_MEMORY):
            raise TrainingStoppedError(
                f"there is no memory for {device_batch} contexts at a time; a smaller training.device_batch is needed, "
                f"and {checkpoint_hint(out)}"
            ) from problem
        if is_lost_process(problem):
            raise TrainingStoppedError(f"another process of the run has ended; {checkpoint_hint(out)}") from problem
        if trainer.resumed is not None:
            raise TrainingStoppedError(
                f"training cannot resume from {resumed} ({first_line(problem)}); remove it to try the one before"
            ) from problem
        raise
    finally:
        for callback in trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.close()  # so that an error message has a line of its own
    return out / "model"


def _run_steps(trainer: ContextTrainer, recipe: Recipe) -> None:
    """Train to the last step, or to the end of the step in which a signal comes."""
    model: Any = trainer.model
    with augmented(model, recipe.augmentation, trainer.batch_part), deferred() as waiting:
        trainer.add_callback(StopCallback(waiting))
        try:
            trainer.train(resume_from_checkpoint=trainer.resumed)
            return
        except RunStopped as stopped:
            number = stopped.number
    raise Interrupted(number)  # the signal came to another process, or its handler does not end the run


def _write_model(trainer: ContextTrainer, recipe: Recipe, tokenizer: Any, out: Path, minutes: float) -> None:
    """The final model, all of it or nothing: written to a folder beside it, which is renamed."""
    model: Any = trainer.model
    folder, partial, old = out / "model", out / PARTIAL_MODEL, out / OLD_MODEL
    try:
        model.save_pretrained(partial, state_dict=weights_to_save(model, recipe.training.precision))
        tokenizer.save_pretrained(partial)
        for name in ("recipe.yaml", "log.jsonl"):
            (partial / name).write_text((out / name).read_text())
        (partial / CARD).write_text(card(recipe, model, minutes, folder.as_posix()))
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        _clean_up_models(out)


def _clean_up_models(out: Path) -> None:
    """Remove a half-written model and a replaced one; the latter is the model again if no other took its place."""
    folder, old = out / "model", out / OLD_MODEL
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (out / PARTIAL_MODEL, old):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _named_errors(out: Path) -> Iterator[None]:
    """A full disk, or a file of the run that cannot be read or written, is an error that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        if any(sign in str(problem) for sign in FULL_DISK):
            where = getattr(problem, "filename", None) or f"the disk of {out}"
            raise TrainingStoppedError(f"there is no room left on {where}; {checkpoint_hint(out)}") from problem
        if isinstance(problem, OSError) and problem.filename is not None and _is_in(problem.filename, out):
            what = f"{problem.filename} cannot be read or written ({problem.strerror})"
            raise TrainingStoppedError(f"{what}; {checkpoint_hint(out)}") from problem
        raise


def _is_in(file: Any, out: Path) -> bool:
    return Path(os.path.abspath(os.fsdecode(file))).is_relative_to(os.path.abspath(out))


def configuration(recipe: Recipe, tokenizer: Any) -> BamConfig:
    """The recipe's model with the tokenizer's vocabulary."""
    config = recipe.config(
        vocab_size=recipe.model.get("vocab_size", len(tokenizer)),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"the tokenizer {recipe.data.tokenizer} has no end token; documents need one between them")
    if config.vocab_size < len(tokenizer):
        raise RecipeError(f"model.vocab_size is {config.vocab_size}; the tokenizer needs at least {len(tokenizer)}")
    return config


def build_model(config: BamConfig) -> BamForCausalLM:
    """The model of a configuration, with random weights."""
    try:
        return CAUSAL_MODELS[config.model_type](config)
    except ValueError as problem:  # a prior that cannot be, such as a window of more keys than are counted
        raise RecipeError(f"model: {problem}") from problem


def freeze(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Take the parameters whose names match a pattern out of training."""
    for pattern in patterns:
        names = [name for name, _ in model.named_parameters() if fnmatchcase(name, pattern)]
        if not names:
            some = ", ".join([name for name, _ in model.named_parameters()][:3])
            raise RecipeError(f"training.freeze has {shown(pattern)}, which no parameter matches; there are {some}, …")
        for name in names:
            model.get_parameter(name).requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(f"training.freeze is {shown(list(patterns))}; no parameter is left to train")


def weights_to_save(model: BamForCausalLM, precision: str) -> dict[str, Tensor]:
    """Weights of linear layers in bfloat16 after bf16 training, all others in float32."""
    weights = model.state_dict()
    if precision == "bf16":
        matrices = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        if model.config.tie_word_embeddings:
            matrices.remove("lm_head.weight")
        weights.update({name: weights[name].bfloat16() for name in matrices})
    return weights


def _start_from(name: str, model: BamForCausalLM) -> None:
    """Load the weights of a trained model.

    A missing encoder of delayed states keeps its random weights. With another position the priors and temperatures of
    the recipe are new, and those of the trained model are left out.
    """
    try:
        config, place, settings = load_config(name)
    except UserError as problem:
        raise RecipeError(f"start is {name!r}; there is no such model to start from ({problem})") from problem
    trained = load_weights(name, config, place, settings)
    new: tuple[str, ...] = (NEW_ENCODER,)
    weights = trained.state_dict()
    if getattr(config, "position", model.config.position) != model.config.position:
        new = (*new, *NEW_POSITION)
        known = model.state_dict()
        weights = {key: value for key, value in weights.items() if key in known or not _is_of(key, NEW_POSITION)}
    try:
        missing, unknown = model.load_state_dict(weights, strict=False)
    except RuntimeError:
        missing, unknown = ["all"], []
    if unknown or not all(_is_of(weight, new) for weight in missing):
        raise RecipeError(f"the recipe's model cannot start from {name}; its weights do not match in name or shape")
    model.reset_config_buffers()


def _is_of(weight: str, parts: Iterable[str]) -> bool:
    return any(f".{part}." in weight for part in parts)


def split_batch(recipe: Recipe, devices: int) -> tuple[int, int]:
    """Contexts of a device in one forward pass, and gradient-accumulation steps."""
    settings, negatives = recipe.training, recipe.augmentation.in_batch_negatives
    at_once = settings.device_batch or settings.batch // devices
    if at_once < 1 or settings.batch % (at_once * devices):
        raise RecipeError(
            f"a batch of {settings.batch} contexts does not divide among {devices} devices with {at_once} at a time"
        )
    if negatives >= at_once:
        raise RecipeError(
            f"augmentation.in_batch_negatives is {negatives} and a device takes {at_once} contexts at a time; at most "
            f"{at_once - 1} are allowed"
        )
    group = 2 ** ((negatives + 1).bit_length() - 1)  # contexts that see each other's keys, at most
    if devices > 1 and not settings.device_batch and at_once % group:
        raise RecipeError(
            f"augmentation.in_batch_negatives is {negatives} and each of {devices} devices takes {at_once} contexts, "
            f"not a multiple of {group}, so that the run would differ from that on one device; set "
            "training.device_batch"
        )
    return at_once, settings.batch // (at_once * devices)


def _contexts(recipe: Recipe, tokenizer: Any, out: Path, first: int) -> Contexts | StreamedContexts:
    data, settings = recipe.data, recipe.training

    def texts() -> Iterator[str]:
        return documents(data.source, "train", data.text_field)

    if data.stream:
        if not data.source.startswith("hf:"):
            next(texts(), "")  # so that a wrong source is an error here, before anything is written
        streamed = StreamedContexts(texts, tokenizer, data.context, out / STREAM_PLACES)
        streamed.start = first
        return streamed
    number = settings.last_step * settings.batch
    return Contexts(encode_stream(texts(), tokenizer), tokenizer, data, number=number, seed=recipe.seed)


def _check_recipe(recipe: Recipe, out: Path, resume: bool, start: Path | None) -> str:
    """The hash of the text; raises an error for a changed text or recipe, or for a run that is there already."""
    file = out / "recipe.yaml"
    wanted = _as_yaml(recipe)
    content = "" if recipe.data.stream else content_of(recipe.data.source).get("content", "")
    if resume and start is not None and (out / SOURCE_HASH).exists() and (out / SOURCE_HASH).read_text() != content:
        raise RecipeError(f"{recipe.data.source} has changed since {out} was begun; it would not be the same run")
    if file.exists():
        before = _recipe_before(file)
        with suppress(RecipeError, TypeError):  # settings that are newer than the run have their defaults
            before = _as_yaml(parse_recipe(before))
        if resume and before != wanted:
            old, new = _flatten(before), _flatten(wanted)
            changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            raise RecipeError(f"{out} was begun with another recipe; what differs: {', '.join(changed)}")
        finished = any((out / name / "config.json").exists() for name in ("model", OLD_MODEL))
        if not resume and (start is not None or finished):
            raise RecipeError(f"{out} has a run already; resume it, or choose another folder")
    return content


def _recipe_before(file: Path) -> dict[str, Any]:
    try:
        before = read_yaml(file.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as problem:
        raise RecipeError(f"{file}, the recipe that the run was begun with, is damaged: {problem}") from problem
    return before if isinstance(before, dict) else {}


def _begin(recipe: Recipe, out: Path, source_hash: str, fresh: bool) -> None:
    """Write the recipe beside the run, and clean up what a run that died left half-done."""
    if not is_main_process():
        return
    out.mkdir(parents=True, exist_ok=True)
    incomplete = [folder for folder in out.glob("checkpoint-*") if not (folder / COMPLETE).exists()]
    for leftover in incomplete:
        shutil.rmtree(leftover, ignore_errors=True)
    _clean_up_models(out)
    if fresh:
        (out / STREAM_PLACES).unlink(missing_ok=True)  # left by a run that died before its first checkpoint
    write_whole(out / SOURCE_HASH, source_hash)
    write_whole(out / "recipe.yaml", yaml.safe_dump(_as_yaml(recipe), sort_keys=False))


def _as_yaml(recipe: Recipe) -> dict[str, Any]:
    """The recipe in the types of YAML, without tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(recipe.to_dict()))
    return plain


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat

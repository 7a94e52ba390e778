"""Follow a recipe on `transformers.Trainer`: any number of devices, logging, checkpoints, exact resumption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils.data import SequentialSampler
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from bayesattn.data.contexts import Contexts, StreamedContexts, encode_stream
from bayesattn.data.text import documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError, first_line
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import measure
from bayesattn.files import content_of, whole_lines, write_whole
from bayesattn.hub import hub_answers
from bayesattn.models.configuration import BamConfig
from bayesattn.models.modeling import BamForCausalLM
from bayesattn.models.shipped import resolve
from bayesattn.training.card import card
from bayesattn.training.optimizers import make_optimizer, make_schedule
from bayesattn.training.recipe import Recipe, RecipeError, parse_recipe

# Written into a checkpoint when all of it is there.
COMPLETE = "complete"
# Tells the text of a run from another of the same name; of one that is streamed there may be too much to look at.
CONTENT = "source.sha256"
# Where in a stream contexts begin.
PLACES = "places.jsonl"
# Multiples of the training length, and trials of each, in evaluations along the way.
EVALUATED = {1: 40, 16: 20}
EXAMINED = {
    "passkey": passkey.Task(),
    "seen wording": passkey.Task("train"),
    "held-out wording": passkey.Task("held-out"),
}
# Written last into a finished model.
CARD = "README.md"
# What writing says when there is no room: the system, and torch's own writer.
FULL_DISK = ("No space left", "PytorchStreamWriter", "unexpected pos")
LEAST_EVALUATED = 128  # tokens: a shorter prompt has no room for what is asked


class TrainingStoppedError(UserError):
    """Training cannot go on, in one sentence."""


def train(recipe: Recipe, out: Path, *, resume: bool = False, report_to: str = "none") -> Path:
    """Train, writing checkpoints to `out`; returns the folder of the final model, `out`/model.

    With `resume` it goes on from the newest whole checkpoint as if it had never stopped.
    """
    if report_to not in (places := ("none", "all", *get_available_reporting_integrations())):
        raise UserError(
            f"progress is to be reported to {report_to!r}; here there are {', '.join(places)}, and others when their "
            "packages are installed"
        )
    keeper = _Keeper(out)
    out.mkdir(parents=True, exist_ok=True)
    newest = _newest_checkpoint(out)
    _check_recipe(recipe, out, resume, newest)
    resumed = newest if resume else None
    if resume and resumed is None:
        tqdm.write(f"{out} has no checkpoint to go on from; training begins at the beginning")
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    examiner = _Examiner(recipe, tokenizer)
    torch.manual_seed(recipe.seed)
    model = BamForCausalLM(configuration(recipe, tokenizer))
    if recipe.start and resumed is None:
        _start_from(recipe.start, model)
    settings = recipe.training
    device_batch, accumulation = shares(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    done = int(resumed.name.rpartition("-")[2]) if resumed else 0
    contexts = _contexts(recipe, tokenizer, out, first=done * settings.batch)
    optimizer = make_optimizer(model, settings)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=settings.last_step,
        per_device_train_batch_size=device_batch,
        gradient_accumulation_steps=accumulation,
        ignore_data_skip=recipe.data.stream,  # it starts where it should by itself
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
    if arguments.n_gpu > 1:
        raise UserError(
            f"there are {arguments.n_gpu} GPUs; start with `accelerate launch -m bayesattn.cli train …`, or let it see "
            "one of them with CUDA_VISIBLE_DEVICES=0"
        )
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=contexts,
        optimizers=(optimizer, make_schedule(optimizer, settings)),
        callbacks=[keeper, examiner],
        data_collator=_stack,
    )
    examiner.trainer = trainer
    folder = out / "model"
    trainer.resumed = str(resumed) if resumed else None
    try:
        if done < settings.last_step:
            trainer.train(resume_from_checkpoint=trainer.resumed)
        else:  # all that is left to do is to write the model
            trainer._load_from_checkpoint(str(resumed))
            if trainer.is_world_process_zero():
                keeper.go_on(done)
        if trainer.is_world_process_zero():
            model.save_pretrained(folder, state_dict=weights_to_keep(model, settings.precision))
            tokenizer.save_pretrained(folder)
            (folder / "recipe.yaml").write_text((out / "recipe.yaml").read_text())
            (folder / "log.jsonl").write_text((out / "log.jsonl").read_text())
            (folder / CARD).write_text(card(recipe, model, keeper.seconds / 60, folder.as_posix()))
    except UserError:
        raise
    except Exception as problem:
        if any(sign in str(problem) for sign in FULL_DISK):
            raise TrainingStoppedError(f"there is no room left on the disk of {out}; {_last_good(out)}") from problem
        if trainer.resumed is not None:  # not one step was made
            raise TrainingStoppedError(
                f"{resumed} cannot be gone on from ({first_line(problem)}); remove it to go on from the one before"
            ) from problem
        raise
    finally:
        for callback in trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.close()  # what is said of a run that broke off has a line of its own
    return folder


def configuration(recipe: Recipe, tokenizer: Any) -> BamConfig:
    """The recipe's model with the tokenizer's vocabulary."""
    config = recipe.config(
        vocab_size=recipe.model.get("vocab_size", len(tokenizer)),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"the tokenizer {recipe.data.tokenizer} has no end token; documents could not be told apart")
    if config.vocab_size < len(tokenizer):
        raise RecipeError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; it needs them all"
        )
    return config


def weights_to_keep(model: BamForCausalLM, precision: str) -> dict[str, Tensor]:
    """Matrices as products had them in training, the rest in full. They are loaded as float32 either way."""
    weights = model.state_dict()
    if precision == "bf16":
        matrices = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        if model.config.tie_word_embeddings:
            matrices.remove("lm_head.weight")
        weights.update({name: weights[name].bfloat16() for name in matrices})
    return weights


def _start_from(name: str, model: BamForCausalLM) -> None:
    """Give the model the weights of a trained one; hindsight is new if that has none."""
    try:
        near = Path(resolve(name)).is_dir() or not hub_answers()
        trained = BamForCausalLM.from_pretrained(name, local_files_only=near)
    except OSError as problem:
        raise RecipeError(f"start is {name!r}; there is no such model to go on from") from problem
    try:
        missing, unknown = model.load_state_dict(trained.state_dict(), strict=False)
    except RuntimeError:
        missing, unknown = ["all"], []
    if unknown or not all(weight.startswith("model.hindsight.") for weight in missing):
        raise RecipeError(f"{name} has not the shape of the recipe's model; it cannot be gone on from")
    model.follow_configuration()


def shares(recipe: Recipe, devices: int) -> tuple[int, int]:
    """Contexts that a device takes at a time, and how often before a step."""
    settings, crowd = recipe.training, recipe.model.get("crowd", 0)
    at_once = settings.device_batch or settings.batch // devices
    if at_once < 1 or settings.batch % (at_once * devices):
        raise RecipeError(
            f"a batch of {settings.batch} contexts does not divide among {devices} devices with {at_once} at a time"
        )
    if crowd >= at_once:
        raise RecipeError(f"model.crowd is {crowd} and a device takes {at_once} contexts at a time; it needs more")
    return at_once, settings.batch // (at_once * devices)


def _contexts(recipe: Recipe, tokenizer: Any, out: Path, first: int) -> Contexts | StreamedContexts:
    data, settings = recipe.data, recipe.training

    def texts() -> Iterator[str]:
        return documents(data.source, "train", data.text_field)

    if data.stream:
        streamed = StreamedContexts(texts, tokenizer, data.context, out / PLACES)
        streamed.start = first
        return streamed
    number = settings.last_step * settings.batch
    return Contexts(encode_stream(texts(), tokenizer), tokenizer, data, number=number, seed=recipe.seed)


def _stack(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


class _Trainer(Trainer):
    """Contexts in the order of their numbers, and a stop at the first loss or gradient that is not a number.

    A batch taken in parts, by one device or several, has the loss it has as a whole: the mean over all its tokens.
    """

    mean_weight = 1.0  # of the parts of the batch at hand

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        parts, number = super().get_batch_samples(*args, **kwargs)
        if parts:
            weights = torch.stack([_weight(part) for part in parts]).to(self.args.device)
            self.mean_weight = max(1e-6, float(self.accelerator.gather(weights).mean()))  # all may weigh nothing
        return parts, number

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * (float(_weight(inputs)) / self.mean_weight)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return None if isinstance(self.train_dataset, StreamedContexts) else SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    resumed: str | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.resumed is not None:  # making the loader's iterator drew a number
            self._load_rng_state(self.resumed)
            self.resumed = None
        loss = super().training_step(*args, **kwargs)
        self._need_finite("loss", loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:  # before the optimizer's step
        norm = super()._get_grad_norm(*args, **kwargs)
        self._need_finite("gradient", torch.as_tensor(norm))
        return norm

    def _need_finite(self, what: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            last = _last_good(Path(self.args.output_dir))  # type: ignore[arg-type]
            raise TrainingStoppedError(f"the {what} became {value.item()} at step {self.state.global_step + 1}; {last}")


def _weight(part: dict[str, Tensor]) -> Tensor:
    """What the tokens that a part of a batch is to predict weigh together."""
    return ((part["labels"][:, 1:] != -100) * part["loss_weights"][:, 1:]).sum()


class _Keeper(TrainerCallback):
    """Marks checkpoints that are whole, and keeps the log; of several processes the first does."""

    def __init__(self, out: Path) -> None:
        self.log = out / "log.jsonl"
        self.begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of training, what was done before an interruption included."""
        return time.perf_counter() - self.begin

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.go_on(state.global_step)

    def go_on(self, step: int) -> None:
        """What was logged after the checkpoint that training goes on from will be logged again."""
        lines = whole_lines(self.log) if step else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.log.write_text("".join(line + "\n" for line in kept))
        if kept:
            self.begin -= json.loads(kept[-1])["seconds"]

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero:
            entry = {"step": state.global_step, "seconds": round(self.seconds, 1), **(logs or {})}
            with self.log.open("a") as file:
                file.write(json.dumps(entry) + "\n")


class _Examiner(TrainerCallback):
    """Retrieval at the training length and at 16 times that, every now and then."""

    trainer: _Trainer

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        every = self.recipe.training.evaluate_every
        if not every or state.global_step % every or not state.is_world_process_zero:
            return
        model.eval()
        reader = Reader(self.recipe.name, model, self.tokenizer, self.recipe.data.context)
        found: dict[str, float] = {}
        for multiple, trials in EVALUATED.items():
            length = multiple * self.recipe.data.context
            if length < LEAST_EVALUATED:
                continue
            for name, task in EXAMINED.items():
                try:
                    cell = measure(reader, task, length, trials)
                except UserError as problem:  # a tokenizer with longer prompts, for instance: no reason to stop
                    tqdm.write(f"step {state.global_step}, {name}, {multiple}×: not measured, {problem}")
                    continue
                tqdm.write(f"step {state.global_step}, {name}, {multiple}×: {cell}")
                found[f"{name}, {multiple}×"] = cell.right / cell.trials
        if found:
            self.trainer.log(found)
        model.train()


def _newest_checkpoint(out: Path) -> Path | None:
    whole = [path.parent for path in out.glob(f"checkpoint-*/{COMPLETE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _last_good(out: Path) -> str:
    newest = _newest_checkpoint(out)
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint before it"


def _check_recipe(recipe: Recipe, out: Path, resume: bool, start: Path | None) -> None:
    """Keep the recipe beside the run; refuse to go on with another, or to overwrite a run."""
    file = out / "recipe.yaml"
    wanted = _plain(recipe)
    content = "" if recipe.data.stream else content_of(recipe.data.source).get("content", "")
    if resume and start is not None and (out / CONTENT).exists() and (out / CONTENT).read_text() != content:
        raise RecipeError(f"{recipe.data.source} has changed since {out} was begun; it would not be the same run")
    if file.exists():
        before = yaml.safe_load(file.read_text()) or {}
        with suppress(RecipeError, TypeError):  # settings that came after the run was begun have their defaults
            before = _plain(parse_recipe(before))
        if resume and before != wanted:
            changed = sorted(
                key for key in {*_flat(before), *_flat(wanted)} if _flat(before).get(key) != _flat(wanted).get(key)
            )
            raise RecipeError(f"{out} was begun with another recipe; what differs: {', '.join(changed)}")
        if not resume and (start is not None or (out / "model" / "config.json").exists()):
            raise RecipeError(f"{out} has a run already; resume it, or choose another folder")
    if os.environ.get("RANK", "0") != "0":  # of several processes the first writes
        return
    if start is None or not resume:
        (out / PLACES).unlink(missing_ok=True)  # of a run that died before its first checkpoint
    write_whole(out / CONTENT, content)
    write_whole(file, yaml.safe_dump(wanted, sort_keys=False))


def _plain(recipe: Recipe) -> dict[str, Any]:
    """As YAML has it, without tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(recipe.to_dict()))
    return plain


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found

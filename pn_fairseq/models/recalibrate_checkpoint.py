"""Re-estimate the running statistics of a fairseq checkpoint on training data, and compute its
validation loss.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from fairseq import tasks, utils
from tqdm import tqdm

from pn_fairseq.common.checkpoints import CheckpointError
from pn_fairseq.models.from_checkpoint import load_weights, one_line, settings_of
from pn_fairseq.norms.core.base import RunningNorm
from pn_fairseq.norms.recalibrate import recalibrating

VALID = "valid"


@dataclass(frozen=True)
class Loss:
    """Negative log-likelihood per target token (base 2) over ``sentences`` sentences with
    ``tokens`` target tokens.
    """

    bits: float
    sentences: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.bits:.4f} bits per token ({self.sentences} sentences, {self.tokens} tokens)"


class ModelWithData:
    """The model of a checkpoint, and the data on which to re-estimate its statistics; float32, on
    the GPU if there is one.

    Args:
        state: a checkpoint as :func:`pn_fairseq.common.checkpoints.load_checkpoint` returns it. Its
            settings specify the task, the model, the batch size and the seed.
        name: name of the checkpoint in error messages.
        data: a folder that fairseq-preprocess made, with the dictionaries of the model's training.

    Raises:
        CheckpointError: model and data do not fit each other, or one of them cannot be used.
    """

    def __init__(self, state: dict, name: str, data: Path):
        self.data = data
        self.cfg = settings_of(state, name)
        self.cfg.task.data = str(data)
        self.cfg.task.eval_bleu = False  # would build a tokenizer and a beam search
        try:
            self.task = tasks.setup_task(self.cfg.task, from_checkpoint=True)
        except Exception as error:  # fairseq raises plain Exceptions here
            raise CheckpointError(
                f"{data}: cannot be used as the data of {name} ({one_line(error)})"
            ) from error
        if "task_state" in state:
            self.task.load_state_dict(state["task_state"])
        try:
            self.model = self.task.build_model(self.cfg.model, from_checkpoint=True)
        except Exception as error:
            raise CheckpointError(
                f"{name}: its model cannot be built ({one_line(error)})"
            ) from error
        load_weights(self.model, state["model"], f"{name} with the data in {data}", self.cfg.model)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device).eval()

    def batches(self, split: str, train: bool):
        """The batches of a split: shuffled with the checkpoint's seed for training, else all
        sentences in order.
        """
        settings = self.cfg.dataset
        max_tokens, max_sentences = settings.max_tokens_valid, settings.batch_size_valid
        # Training skips sentences that are too long for the model; validation does so if the run's
        # settings say so.
        skips, limit = settings.skip_invalid_size_inputs_valid_test, None
        if train:
            max_tokens, max_sentences = settings.max_tokens, settings.batch_size
            skips, limit = True, max_tokens
        longest = utils.resolve_max_positions(
            self.task.max_positions(), self.model.max_positions(), limit
        )
        try:
            if split not in self.task.datasets:
                self.task.load_dataset(split, epoch=1, combine=train)
            batches = self.task.get_batch_iterator(
                self.task.dataset(split),
                max_tokens=max_tokens,
                max_sentences=max_sentences,
                max_positions=longest,
                ignore_invalid_inputs=skips,
                required_batch_size_multiple=1,  # any other drops sentences
                seed=self.cfg.common.seed,
            )
            return batches.next_epoch_itr(shuffle=train)
        except Exception as error:
            raise CheckpointError(
                f"{self.data}: cannot read the subset '{split}' ({one_line(error)})"
            ) from error

    @torch.no_grad()
    def validate(self) -> Loss:
        """The loss over the validation data, in evaluation mode and without label smoothing."""
        total, tokens, sentences = 0.0, 0, 0
        pad = self.task.target_dictionary.pad()
        batches = self.batches(VALID, train=False)
        for sample in self.on_device(batches, len(batches), "validating"):
            output = self.model(**sample["net_input"])
            target = self.model.get_targets(sample, output)
            log_probs = self.model.get_normalized_probs(output, log_probs=True).float()
            nll = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            real = target.ne(pad)
            total += nll[real].double().sum().item()
            tokens += int(real.sum())
            sentences += len(target)
        if not tokens:
            raise CheckpointError(f"{self.data}: the subset '{VALID}' is empty")
        return Loss(total / tokens / math.log(2), sentences, tokens)

    @torch.no_grad()
    def recalibrate(self, number: int) -> int:
        """Re-estimate the running statistics on ``number`` training batches, or all if there are
        fewer; returns their number.
        """
        subset = self.cfg.dataset.train_subset
        batches = self.batches(subset, train=True)
        number = min(number, len(batches))
        if not number:
            raise CheckpointError(f"{self.data}: the subset '{subset}' is empty")
        with recalibrating(self.model):
            for sample in self.on_device(islice(batches, number), number, "recalibrating"):
                self.model(**sample["net_input"])
        return number

    def store(self, weights: dict[str, torch.Tensor]) -> None:
        """Write the running statistics into ``weights``, the ``"model"`` of a checkpoint, and keep
        the dtypes there.
        """
        for prefix, norm in self.model.named_modules(remove_duplicate=False):
            if isinstance(norm, RunningNorm):
                for name, buffer in norm.named_buffers():
                    key = f"{prefix}.{name}"
                    weights[key] = buffer.to("cpu", weights[key].dtype, copy=True)

    def on_device(self, samples: Iterable[dict], total: int, what: str) -> Iterator[dict]:
        """The batches on the model's device, with a progress bar labelled ``what``."""
        # disable=None: show a bar only on a terminal.
        for sample in tqdm(
            samples, desc=what, total=total, unit="batch", leave=False, disable=None
        ):
            yield utils.move_to_cuda(sample) if self.device.type == "cuda" else sample

"""convert_norms in models of other packages: one call each, three steps, statistics against a loop
over real tokens. The table of docs/frameworks.md, and tests/norms/test_frameworks.py.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from pn_fairseq.norms import convert_norms, padding, running_norms

B = 3
T = 7
C = 16
LENGTHS = torch.tensor([7, 4, 2])
MASK = torch.arange(T) >= LENGTHS[:, None]
STEPS = 3


class Absent(Exception):
    """A package is not installed."""


def find(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise Absent(f"{name} is not installed")


def available(name: str) -> None:
    """Raise :class:`Absent` without the package ``name``. Where only torch for CPUs is installed,
    other packages of which PyPI has builds for CUDA alone are loaded without their compiled part.
    """
    find(name)
    flags = dict.fromkeys(("_IS_TORCHAUDIO_EXT_AVAILABLE", "_IS_ALIGN_AVAILABLE"), False)
    stand_in("torchaudio._extension", fail_if_no_align=lambda function: function, **flags)
    if "fairseq2n" not in sys.modules and importlib.util.find_spec("fairseq2n") is None:
        stand_in("fairseq2n", DOC_MODE=True)  # what fairseq2's documentation is built with
    if importlib.util.find_spec("torchvision") is not None:
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            for operator in ("nms", "qnms"):
                TORCHVISION.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


def stand_in(name: str, **content) -> None:
    if torch.version.cuda is None:
        sys.modules.setdefault(name, SimpleNamespace(**content))


def hugging_face():
    """The package ``transformers``."""
    find("transformers")
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):  # a build for another torch, which transformers would import
        sys.modules["torchaudio"] = None
    try:
        import transformers.models.bert.modeling_bert
        import transformers.models.marian.modeling_marian
        import transformers.models.t5.modeling_t5  # noqa: F401
    finally:
        if sys.modules.get("torchaudio", True) is None:
            del sys.modules["torchaudio"]
    import transformers

    return transformers


TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")


def x_transformers(norm: str = ""):
    available("x_transformers")
    import x_transformers as package

    options = {norm: True} if norm else {}
    model = package.Encoder(dim=C, depth=2, heads=2, attn_dim_head=8, **options)
    return model, lambda m, x: m(x, mask=~MASK)


def joeynmt():
    available("joeynmt")
    from joeynmt import encoders

    model = encoders.TransformerEncoder(
        C, 32, num_layers=2, num_heads=2, dropout=0.0, emb_dropout=0.0
    )
    return model, lambda m, x: m(x, LENGTHS, ~MASK[:, None])[0]


def eole():
    available("eole")
    from eole.config.models import TransformerEncoderConfig
    from eole.encoders.transformer import TransformerEncoder

    config = TransformerEncoderConfig(
        layers=2, hidden_size=C, heads=2, transformer_ff=32, src_word_vec_size=C
    )
    model = TransformerEncoder(config)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return model, lambda m, x: m(x, pad_mask=MASK[:, None])[0]


def fairseq2():
    available("fairseq2")
    from fairseq2.models import transformer as parts
    from fairseq2.nn import BatchLayout, StandardLayerNorm

    def layer():
        attention = parts.StandardMultiheadAttention(C, 2, parts.NaiveSDPA(parts.IdentityBias()))
        norms = [StandardLayerNorm(C, bias=True) for _ in range(2)]
        ffn = parts.StandardFeedForwardNetwork(C, 32, bias=True)
        return parts.StandardTransformerEncoderLayer(attention, norms[0], ffn, norms[1])

    model = parts.StandardTransformerEncoder([layer(), layer()])
    return model, lambda m, x: m(x, BatchLayout((B, T), LENGTHS.tolist()))


def speechbrain():
    available("speechbrain")
    from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder

    model = TransformerEncoder(2, 2, 32, d_model=C)
    return model, lambda m, x: m(x, src_key_padding_mask=MASK)[0]


def conformer():
    available("torchaudio")
    from torchaudio.models import Conformer

    model = Conformer(C, 2, 32, 2, 3)
    masks = ["key_padding_mask", "lengths"]
    convert_norms(
        model, "layer", only="*.conv_module.layer_norm", zero_padding=True, mask_from=masks
    )
    return model, lambda m, x: m(x, LENGTHS)[0]


def torch_encoder():
    layer = nn.TransformerEncoderLayer(C, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(C))
    return model, lambda m, x: m(x, src_key_padding_mask=MASK)


def torch_transformer():
    model = nn.Transformer(C, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    masks = {f"{part}_key_padding_mask": MASK for part in ("src", "tgt", "memory")}
    return model, lambda m, x: m(x, x, **masks)


def timm():
    available("timm")
    from timm.models.vision_transformer import Block

    return nn.Sequential(Block(C, 2), Block(C, 2)), lambda m, x: m(x)


def torchtune():
    available("torchtune")
    from torchtune.models.llama3 import llama3

    model = llama3(
        vocab_size=40, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=C, max_seq_len=32
    )

    def call(m, x):
        with padding(MASK):
            return m(tokens_of(x))

    return model, call


def tokens_of(x):
    return (x[..., 0].abs() * 10).long() % 40


def of_hugging_face(name: str, **sizes):
    available("transformers")
    hf = hugging_face()
    config = getattr(hf, f"{name}Config")(vocab_size=40, **sizes)

    def call(m, x):
        return m(input_ids=tokens_of(x), attention_mask=(~MASK).long()).last_hidden_state

    return getattr(hf, f"{name}Model")(config), call


def bert():
    return of_hugging_face("Bert", **SIZES, **OFF)


def bert_for_masked_lm():
    available("transformers")
    available("accelerate")
    hf = hugging_face()
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=40, **SIZES, **OFF))


class Rows(torch.utils.data.IterableDataset):
    """Rows in their order."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def train(model, rows):
    """By a ``Trainer``, :data:`STEPS` updates of two batches each."""
    from transformers import Trainer, TrainingArguments

    sizes = {"max_steps": STEPS, "per_device_train_batch_size": B, "gradient_accumulation_steps": 2}
    silent = dict(save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, optim="sgd", learning_rate=0.1, use_cpu=True, **sizes, **silent
        )
        Trainer(model, arguments, train_dataset=Rows(rows)).train()


def whisper():
    """Its sentences are in reverse order in the decoder.

    Its encoder attends to padding, which stays silence here.
    """
    available("transformers")
    hf = hugging_face()
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    ffn = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
    lengths = {"max_source_positions": T, "max_target_positions": T}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "d_model": C, "num_mel_bins": C}
    symbols = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")}
    config = hf.WhisperConfig(vocab_size=40, **symbols, **layers, **heads, **ffn, **lengths)

    def call(m, x):
        silenced = x.masked_fill(MASK[..., None], 0.0)
        given = {
            "input_features": silenced.repeat_interleave(2, 1).transpose(1, 2),
            "decoder_input_ids": tokens_of(x).flip(0),
            "decoder_attention_mask": (~MASK).long().flip(0),
        }
        with padding(MASK, only="encoder.*"):
            y = m(**given).last_hidden_state
        return y.flip(0)

    return hf.WhisperModel(config), call


def with_lora(model):
    available("peft")
    import peft

    # No layer here is torchao's; PEFT refuses the version that torchtune needs.
    config = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    with mock.patch("peft.tuners.lora.torchao.is_torchao_available", return_value=False):
        return peft.get_peft_model(model, config)


SIZES = dict(hidden_size=C, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Case:
    """``make`` returns the model and its call; ``options`` go to convert_norms; ``wrap`` gets the
    converted model.

    ``mask`` and ``by_hand`` stand in the table: where the mask comes from, and what must be written
    by hand. Sentences are in reverse order in the module ``reversed_in``. ``trainer``:
    :func:`trainer_errors` measures.
    """

    make: Callable
    mask: str
    by_hand: str = ""
    options: dict = field(default_factory=dict)
    wrap: Callable = staticmethod(lambda model: model)
    no_padding: bool = False
    reversed_in: str = ""
    trainer: bool = False


CASES = {
    "`nn.TransformerEncoder`": Case(torch_encoder, "`src_key_padding_mask`"),
    "`nn.Transformer`": Case(torch_transformer, "`src_key_padding_mask`, `tgt_key_padding_mask`"),
    "Hugging Face Bert": Case(bert, "`attention_mask`"),
    "Hugging Face Bert, `Trainer`, checkpointing, accumulation": Case(
        bert_for_masked_lm, "`attention_mask`", "`context_fn=padding.context_fn`", trainer=True
    ),
    "Hugging Face Bert, LoRA (PEFT)": Case(
        bert,
        "`attention_mask`",
        "convert first",
        wrap=with_lora,
    ),
    "Hugging Face Whisper": Case(
        whisper,
        '`with padding(mask, only="encoder.*")`, `decoder_attention_mask`',
        '`mask_from="attention_mask"`, and the block for the encoder, whose attention reads '
        "padding",
        {"mask_from": "attention_mask"},
        reversed_in="decoder",
    ),
    "Hugging Face Llama": Case(lambda: of_hugging_face("Llama", **SIZES), "`attention_mask`"),
    "Hugging Face Gemma": Case(
        lambda: of_hugging_face("Gemma", **SIZES, num_key_value_heads=2, head_dim=8),
        "`attention_mask`",
    ),
    "x-transformers": Case(x_transformers, "`mask`"),
    "x-transformers, RMSNorm": Case(lambda: x_transformers("use_rmsnorm"), "`mask`"),
    "joeynmt": Case(joeynmt, "`mask`"),
    "eole": Case(eole, "`pad_mask`", "initialize the parameters first"),
    "fairseq2": Case(fairseq2, "`seqs_layout`"),
    "speechbrain": Case(speechbrain, "`src_key_padding_mask`"),
    "torchaudio `Conformer`": Case(
        conformer,
        "`lengths`, `key_padding_mask`",
        'its convolutions read padding: first `convert_norms(model, "layer", '
        'only="*.conv_module.layer_norm", '
        'zero_padding=True)`; then `only="*.conv_module.*.3"`',
        {"only": "*.conv_module.*.3"},
    ),
    "torchtune Llama": Case(torchtune, "`with padding(mask)`", "the block"),
    "timm": Case(timm, "`with padding(None)`", "the block", no_padding=True),
}


def options_of(norm: str) -> dict:
    """Options with which the statistics are exponential averages: in a warm-up they are means over
    all steps.
    """
    return {"psi_warmup_updates": 0} if norm == "power" else {}


def errors(case: Case, norm: str) -> tuple[float, float]:
    """After :data:`STEPS` training steps with padding: the largest difference between a norm's
    statistics and a loop's, and between outputs at real tokens or gradients for two contents of the
    padding; relative to the largest.
    """
    if case.trainer:
        return trainer_errors(case, norm)
    torch.manual_seed(1)
    model, call = case.make()
    options = {**case.options, **options_of(norm)}
    model = case.wrap(convert_norms(model, norm, layout="BTC", **options))
    norms = running_norms(model.train())
    assert len(norms) >= 2
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    other = deepcopy(model)
    real = torch.ones(B, T, dtype=torch.bool) if case.no_padding else ~MASK
    seen = {each: [] for each in norms}

    def see(module, args):
        seen[module].append(args[0].detach().double())

    for each in norms:
        each.register_forward_pre_hook(see)
    target = torch.randn(B, T, 40)
    effect = 0.0
    for _ in range(STEPS):
        x = torch.randn(B, T, C)
        results = []
        filled = x.masked_fill(~real[..., None], 3.0)
        for one, given in ((model, x), (other, filled)):
            with padding(None) if case.no_padding else nullcontext():
                y = call(one, given)[real]
            one.zero_grad()
            weights = target[real][:, : y.size(-1)]
            (y * weights).sum().backward()
            gradients = [each.grad for each in one.parameters() if each.grad is not None]
            results.append([y, *gradients])
        for first, second in zip(*results, strict=True):
            effect = max(effect, difference(first, second))
    error = 0.0
    for each in norms:
        is_reversed = case.reversed_in and each.name.startswith(case.reversed_in)
        mask = real.flip(0) if is_reversed else real
        error = max(error, state_error(each, seen[each], mask))
    return error, effect


def trainer_errors(case: Case, norm: str) -> tuple[float, float]:
    """As :func:`errors`, with two batches for each update; the effect of padding is that on the
    trained parameters.
    """

    names = ("input_ids", "attention_mask", "labels")

    def trained(content):
        torch.manual_seed(1)
        tokens = torch.randint(1, 40, (2 * STEPS, B, T)).masked_fill(MASK, content)
        valid = (~MASK).long().expand_as(tokens)
        labels = tokens.masked_fill(MASK, -100)
        model = convert_norms(case.make(), norm, layout="BTC", **options_of(norm))
        settings = {"use_reentrant": False, "context_fn": padding.context_fn}
        model.activation_checkpointing_enable(settings)
        seen = {each: [] for each in running_norms(model)}
        recomputed = set()

        def see(module, args):
            if torch._C._current_graph_task_id() == -1:
                seen[module].append(args[0].detach().double())
            else:  # in a backward pass
                recomputed.add(module)

        for each in seen:
            each.register_forward_pre_hook(see)
        sentences = []
        for batch in zip(tokens, valid, labels, strict=True):
            for row in zip(*batch, strict=True):
                sentences.append(dict(zip(names, row, strict=True)))
        train(model, sentences)
        assert len(recomputed) == 2 * SIZES["num_hidden_layers"]
        errors = [state_error(each, inputs, ~MASK, 2 * STEPS) for each, inputs in seen.items()]
        return model, max(errors)

    one, error = trained(0)
    other, _ = trained(7)
    effect = 0.0
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        effect = max(effect, difference(first, second))
    return error, effect


def state_error(norm, inputs, real, steps=STEPS) -> float:
    assert int(norm.num_batches_tracked) == len(inputs) == steps
    expected = expected_state(norm, inputs, real)
    return max(difference(norm.get_buffer(key).double(), value) for key, value in expected.items())


def difference(one, two) -> float:
    largest = two.abs().max().clamp(min=1.0)
    return ((one - two).abs().max() / largest).item()


def table_of_frameworks() -> str:
    """As Markdown. Rows of packages that are absent stay as they are."""
    page = (Path(__file__).parents[2] / "docs/frameworks.md").read_text("utf-8")
    committed = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in page.splitlines()
        if line.startswith("| ")
    }
    lines = ["| model | mask from | by hand | statistics | padding |", "|---|---|---|---|---|"]
    for name, case in CASES.items():
        try:
            found = errors(case, "batch")
        except Absent:
            lines.append(committed[name])
            continue
        bounds = ["< 1e-5" if error < 1e-5 else f"{error:.0e}" for error in found]
        lines.append(f"| {name} | {case.mask} | {case.by_hand or '–'} | {' | '.join(bounds)} |")
    return "\n".join(lines)


def expected_state(norm, inputs, real):
    """Statistics of evaluation after the inputs, by a loop over real tokens in float64."""
    name = norm.moment_name
    mean = torch.zeros(C, dtype=torch.float64)
    moment = torch.ones(C, dtype=torch.float64)
    for x in inputs:
        x = x.transpose(1, 2) if norm.layout.own else x
        tokens = [x[b, t] for b in range(B) for t in range(T) if real[b, t]]
        count = len(tokens)
        if norm.mean_name is None:
            batch_mean = mean
            batch = sum(token.square() for token in tokens) / count
        else:
            batch_mean = sum(tokens) / count
            batch = sum((token - batch_mean).square() for token in tokens) / (count - 1)
        mean = norm.alpha_fwd * mean + (1 - norm.alpha_fwd) * batch_mean
        moment = norm.alpha_fwd * moment + (1 - norm.alpha_fwd) * batch
    return {name: moment} if norm.mean_name is None else {name: moment, norm.mean_name: mean}

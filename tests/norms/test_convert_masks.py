"""convert_norms: where the masks of the norms come from, and what tells of a mask that is
missing or wrong.
"""

import copy
import inspect
import pickle
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import (
    MaskedBatchNorm,
    build_norm,
    convert_norms,
    norm_report,
    padding,
    recalibrating,
)
from pn_fairseq.norms.core import checks
from pn_fairseq.norms.masks import search
from pn_fairseq.norms.masks.padding import current_scope

from ..pairwise import in_pairs
from .converted import (
    CONVERTED_NORMS,
    LENGTHS,
    MASK,
    B,
    C,
    FeedForward,
    T,
    converted,
    random_tokens,
    randomized,
    recorded,
    refuses,
    silent,
    warns,
)


class Sub(nn.Module):
    """A module whose forward has a mask, also one of another length."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.pool = nn.LayerNorm(C)

    def forward(self, x, padding_mask=None, *, lengths=None):
        return self.pool(self.norm(x)[:, ::2])


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LayerNorm(C)
        self.inner = Sub()

    def forward(self, x, attention_mask, halved=None, fail=False):
        x = self.first(x)
        if fail:
            raise KeyError("stop")
        return self.inner(x, halved)


def test_the_innermost_module_with_the_argument_decides():
    model = convert_norms(
        Outer(), "batch", mask_from=["padding_mask", "attention_mask"], skip="*pool"
    )
    assert norm_report(model)[1].masks == (
        "argument padding_mask of inner",
        "argument attention_mask of the model",
    )
    line = str(norm_report(model)[1])
    assert (
        "padding(...), else argument padding_mask of inner (if it is None, no other), else "
        "argument attention" in line
    )
    x = random_tokens()
    filled = x.masked_fill(MASK[..., None], 1e4)
    real = ~MASK[:, ::2]
    valid = (~MASK).int()
    for halved in (MASK, torch.zeros(B, T).masked_fill(MASK, -torch.inf)):
        y = copy.deepcopy(model)(filled, valid, halved)
        expected = copy.deepcopy(model)(x, valid, halved)
        assert y[real].equal(expected[real])
    with pytest.raises(KeyError):
        model(x, valid, fail=True)  # leaves no scope behind
    with warns("first takes statistics .* no padding mask has reached it: padding"):
        copy.deepcopy(model).first(x)


@pytest.mark.parametrize("fail", [False, True])
def test_the_scopes_of_two_conversions_end(fail):
    model = convert_norms(
        Outer(), "layer", mask_from="attention_mask", only="first", zero_padding=True
    )
    convert_norms(model, "batch", mask_from="attention_mask", only="inner.norm")
    with pytest.raises(KeyError) if fail else nullcontext():
        model(random_tokens(), (~MASK).int(), fail=fail)
    assert current_scope() is None


def test_an_argument_that_is_none_hides_the_masks_of_modules_around():
    """With the warning, as the inner module may have other tokens; a block holds there."""
    x = random_tokens()
    filled = x.masked_fill(MASK[..., None], 1e4)
    real = ~MASK[:, ::2]
    none = torch.zeros_like(MASK)
    for form, mask, full in (
        ("valid", (~MASK).int(), (~none).int()),
        ("lengths", LENGTHS, (~none).sum(1)),
    ):
        arguments = {"padding_mask": "mask", "attention_mask": form}
        model = convert_norms(Outer(), "batch", mask_from=arguments, skip="*pool")
        with warns(
            r"inner.norm .* reached it \(argument padding_mask of inner is None\)",
        ):
            hidden = copy.deepcopy(model)(filled, mask)
        with silent():
            model(x, full)  # Hugging Face's models hand None on if there is no padding
            with padding(MASK):
                y, expected = (copy.deepcopy(model)(each, mask) for each in (filled, x))
        assert y[real].equal(expected[real])
        assert not y[real].equal(hidden[real])
    model = convert_norms(Outer(), "batch", mask_from=arguments, only="inner.norm")
    with warns("inner.norm"):
        model(x, full + 2)  # of other sequences


class Attending(nn.Module):
    """A layer of a decoder without a mask of its own tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x, encoder_out=None, src_lengths=None):
        return self.norm(x)


def attending(forward):
    """A layer with this forward."""
    return type("Layer", (Attending,), {"forward": forward})()


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.LayerNorm(C)
        self.decoder = Attending()

    def forward(self, x, y, src_lengths=None, lengths=None, target_lengths=None, attends=True):
        memory = self.encoder(x)
        kinds = {
            "dict": {"memory": memory},
            "speaker": memory[:, 0],
            "TBC": memory.transpose(0, 1),
            True: memory,
        }
        return self.decoder(y, kinds.get(attends), src_lengths)


@pytest.mark.parametrize(
    ("argument", "source_length", "attends", "used"),
    [
        ("src_lengths", T, True, False),
        ("src_lengths", T, False, True),
        ("src_lengths", T, "speaker", True),
        ("lengths", T, True, False),
        ("lengths", T, "dict", False),
        ("lengths", T, "TBC", False),
        ("lengths", T + 1, True, False),
        ("target_lengths", T, True, True),
    ],
)
def test_a_mask_of_the_source_is_none_for_what_attends_to_it(
    argument, source_length, attends, used
):
    """Where source and target have equal lengths, no shape tells their masks apart."""
    model = convert_norms(
        EncoderDecoder(), "batch", mask_from={argument: "lengths"}, layout="BTC", only="decoder*"
    )
    source = torch.randn(B, source_length, C)
    target = random_tokens()
    with recorded() as texts:
        model(source, target, attends=attends, **{argument: LENGTHS}).sum().backward()
    assert ["no padding mask has reached it: " in text for text in texts] == [True] * (not used)
    # encoder_out may be None
    assert norm_report(model)[-1].masks == (f"argument {argument} of the model",)
    model.eval()
    tokens = target[~MASK] if used else target.flatten(0, 1)
    assert_close(model.decoder.norm.running_mean, 0.1 * tokens.mean(0))


@pytest.mark.parametrize(
    "name", ["memory", "encoder_outputs", "enc_output", "mem", "enc", "encoder_states"]
)
def test_names_of_what_a_module_attends_to(name):
    forward = eval(f"lambda self, x, {name}: self.norm(x)")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = attending(forward)

        def forward(self, x, src_lengths):
            return self.decoder(x, x)

    model = convert_norms(Model(), "batch", mask_from="src_lengths", layout="BTC")
    assert norm_report(model)[0].masks == ()
    x = random_tokens()
    with warns("no padding mask has reached it"):
        model(x, LENGTHS).sum().backward()
    expected = 0.1 * x.mean((0, 1))
    assert_close(model.decoder.norm.running_mean, expected)


def test_the_decoder_of_torchs_transformer_does_not_take_the_mask_of_the_source():
    make = lambda: nn.Transformer(C, 2, 1, 1, 8, 0.0, batch_first=True)  # noqa: E731
    source, target = torch.randn(2, B, T, C)
    masks = {"src_key_padding_mask": MASK, "tgt_key_padding_mask": MASK.flip(0)}
    model = convert_norms(make(), "batch", mask_from="src_key_padding_mask", layout="BTC")
    found = [bool(each.masks) for each in norm_report(model)]
    assert found == [each.name[:2] == "en" for each in norm_report(model)]
    with warns("decoder.layers.0.norm1 .* no padding mask has reached it: "):
        model(source, target, src_key_padding_mask=MASK)
    model = convert_norms(make(), "batch", mask_from=list(masks), layout="BTC")
    call = lambda model, target: model(source, target, **masks)  # noqa: E731
    assert effect_of_padding(model, call, MASK.flip(0)) == 0


def test_functions_of_an_argument():
    ids = torch.where(MASK, 1, 5)
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(B, 1, 1, T).masked_fill(MASK[:, None, None], lowest)
    for form, mask in ((lambda ids: ids == 1, ids), ("valid", additive)):
        model = converted(mask_from={"lengths": form})
        call = lambda model, x, mask=mask: model(x, lengths=mask)  # noqa: E731
        assert effect_of_padding(model, call, MASK) == 0


def test_a_mask_of_another_length_names_the_module():
    model = convert_norms(Outer(), "batch", mask_from=["padding_mask", "attention_mask"])
    x = random_tokens()
    with refuses(
        r"inner.pool: .* 3 sequences of length 4, .* is for 3 of length 7; .*skip=",
    ):
        model(x, (~MASK).int(), MASK)
    for mask in ({"mask": MASK}, {"lengths": LENGTHS}):
        with (
            padding(**mask),
            refuses("inner.pool.* length 4, and .* 3 of length 7"),
        ):
            convert_norms(Outer(), "batch")(x, None)
    model = convert_norms(Outer(), "batch", skip="inner.norm")
    with padding(MASK):
        with refuses("first: its tokens are 4 sequences of length 7, and .* is for 3"):
            model.first(torch.randn(4, T, C))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mask": (~MASK).long()}, "a mask of torch.int64 does not say whether 1 is padding"),
        ({"valid": MASK.float()}, "may be additive; give bool or int"),
        ({"additive": MASK}, "additive mask .* is not torch.bool"),
        ({"lengths": LENGTHS.float()}, "lengths are \\(B,\\) whole numbers"),
        ({"mask": MASK, "lengths": LENGTHS}, "padding\\(mask=, lengths=\\): give one of them"),
        ({"mask": [[True]]}, "expected a tensor, got list"),
        ({"mask": np.array(["pad"])}, "expected a tensor, got ndarray of <U3"),
        ({"mask": np.zeros((B, T), bool)}, "got ndarray of bool .torch.as_tensor makes one"),
        ({"mask": torch.tensor(True)}, "a value for each token \\(B, T\\), got one value"),
        ({}, "padding\\(\\) without a mask: give one, or None, which says that there is no"),
        ({"only": "norm"}, "padding\\(\\) without a mask"),
    ],
)
def test_wrong_masks(arguments, message):
    with refuses(message):
        padding(**arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": torch.tensor([7, -1, 2])}, r"norm: .* a sentence cannot have -1 tokens"),
        (
            {"mask": MASK[0]},
            r"norm: padding\(mask=...\) is \(7,\), but an input of .* needs \(B, T\)",
        ),
        ({"valid": LENGTHS}, r"norm: padding\(valid=...\) is \(3,\), but an input of .* needs"),
        (
            {"mask": MASK[..., None].expand(B, T, T)},
            r"is \(3, 7, 7\), but an input of \(3, 7, 12\)",
        ),
    ],
)
def test_masks_of_another_form_than_the_tokens(given, message):
    """Without a warning before the error."""
    model = converted()
    with silent(), padding(**given), refuses(message):
        model(random_tokens())


@pytest.mark.parametrize("given", [[7, 4, 2], np.array([7, 4, 2])])
def test_an_argument_that_the_caller_names_is_a_tensor(given):
    """Not so one of a known name, which may mean something else."""
    model = converted(mask_from="lengths")
    message = r"norm: argument lengths of the model: expected a tensor, got .*lengths=torch.tensor"
    with refuses(message):
        model(random_tokens(), given)
    with warns("no padding mask has reached it"):
        converted()(random_tokens(), given)


@pytest.mark.parametrize("form", ["additive", "mask"])
def test_wrong_additive_mask(form):
    with (
        padding(**{form: (~MASK).float()}),
        pytest.raises(
            RuntimeError,
            match="holds 0 at tokens and at most -10000 at padding; give .* if 1 means padding",
        ),
    ):
        convert_norms(nn.LayerNorm(C), "batch")(random_tokens())


@pytest.mark.parametrize("form", ["valid", "lengths", "additive"])
def test_a_block_whose_tensor_is_refilled_has_another_mask(form):
    x = random_tokens()
    model = converted()
    lowest = torch.finfo(torch.float32).min
    forms = {"valid": ~MASK, "lengths": LENGTHS.clone(), "additive": MASK * lowest}
    given = forms[form]
    block = padding(**{form: given})
    for flipped in (MASK, MASK.flip(0)):
        with padding(flipped):
            expected = copy.deepcopy(model)(x)
        with block:
            assert model(x).equal(expected)
        given.copy_(given.flip(0))


def test_one_warning_for_a_model_without_any_mask():
    model = converted()
    x = random_tokens()
    with silent():
        with padding(None):
            model(x).sum().backward()
        with padding(MASK):
            model(x)
        model(x.flatten(0, 1))
        model.eval()(x)
        converted("layer")(x)
    with recorded() as texts:
        model.train()(x)
        model(x)
    (text,) = texts
    assert text.startswith("norm takes statistics over the tokens of a batch")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["batch", "layer", "rms"])
def test_one_warning_for_a_model_that_cannot_write_zeros(norm, training):
    """Without a mask the convolution behind the norm reads padding, so the outputs of real
    tokens are wrong.
    """
    model = converted(norm, zero_padding=True)
    x = random_tokens()
    with padding(MASK):
        model(x).sum().backward()
    model.train(training)
    with silent():
        with padding(None):
            model(x)
        model(x.flatten(0, 1))  # packed tokens
    with recorded() as texts:
        model(x)
        model(x)
    (text,) = texts
    assert "writes zeros at padding (zero_padding=True), and no padding mask has reached it" in text
    assert (
        "is not set to 0 and enters what follows the norm. Run the model in `with padding(...)`"
        in text
    )
    assert ("takes statistics" in text) == ("is counted" in text) == (norm == "batch" and training)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_hooks_of_a_model_serve_copies_of_its_norms_and_no_other_model(copied):
    """As in depth up-scaling, and in PEFT's modules_to_save."""
    model = convert_norms(Stack(), "batch", mask_from="attention_mask")
    model.layers.append(copied(model.layers[1]))
    model.layers[0].norm = nn.Sequential(copied(model.layers[0].norm))
    model = copied(model)
    assert [each.name for each in norm_report(model)][::5] == ["layers.0.norm.0", "layers.2.last"]
    for each in norm_report(model):
        assert each.masks == ("argument attention_mask of the model",)
    valid = (~MASK).long()
    with silent():
        assert effect_of_padding(model, lambda model, x: copied(model)(x, valid), MASK) == 0
    model.layers[0] = converted()
    with warns("norm takes statistics"):
        model(random_tokens(), valid)


class Known(nn.Module):
    """Its class is given the name of a package whose masks are known."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
        self.norm = nn.LayerNorm(C)

    def forward(self, x, mask=None, lengths=None):
        return self.norm(self.inner(x))


@pytest.mark.parametrize("package", ["joeynmt.encoders", "of_a_user"])
def test_masks_of_known_names_are_found_without_being_named(package):
    x = random_tokens()
    expected = convert_norms(Known(), "batch", mask_from="lengths")
    known = type("Known", (Known,), {"__module__": package})
    model = convert_norms(known(), "batch")
    model.load_state_dict(expected.state_dict())
    given = {"mask": ~MASK} if package.startswith("joeynmt") else {"lengths": LENGTHS}
    for block in (MASK, None):  # counts before arguments that nobody named
        with padding(block):
            explicit = copy.deepcopy(model)(x, **given)
        with padding(block):
            assert explicit.equal(copy.deepcopy(model)(x))
    pickle.loads(pickle.dumps(convert_norms(Known(), "batch")))
    assert model(x, **given).equal(expected(x, lengths=LENGTHS))
    assert "mask from padding(...), else argument" in str(norm_report(model)[0])
    with warns("inner.1 takes statistics"):
        convert_norms(known(), "batch", mask_from=())(x, **given)


class Checkpointed(nn.Module):
    def __init__(self, inner, hands_on=True, **options):
        super().__init__()
        self.inner = inner
        self.hands_on = hands_on
        self.options = options

    def forward(self, x, lengths=None):
        given = (lengths,) if self.hands_on and lengths is not None else ()
        return checkpoint(
            self.inner if self.hands_on else self.inner.forward, x, *given, **self.options
        )


#: Way of a mask to a recomputation -> the options of ``checkpoint``.
MASK_GIVEN_BY = {
    "argument, reentrant": {"use_reentrant": True},
    "argument": {"use_reentrant": False},
    "block": {"use_reentrant": False, "context_fn": padding.context_fn},
    "argument of a module around": {"use_reentrant": False, "context_fn": padding.context_fn},
}


@in_pairs(norm=CONVERTED_NORMS, way=list(MASK_GIVEN_BY), together=[True, False])
def test_recomputation_has_the_mask_of_its_forward(norm, way, together):
    """Also where several forwards run before one backward, and one of them had no padding."""
    plain = convert_norms(randomized(FeedForward()), norm, mask_from="lengths")
    around = way == "argument of a module around"
    again = Checkpointed(randomized(FeedForward()), hands_on=not around, **MASK_GIVEN_BY[way])
    again = convert_norms(again, norm, mask_from="lengths")
    again.inner.load_state_dict(plain.state_dict())
    x = random_tokens()
    gradients = {}
    for model in (plain, again):
        inputs = []
        losses = []
        for lengths in (LENGTHS, LENGTHS.flip(0), torch.full_like(LENGTHS, T)):
            inputs.append(x.clone().requires_grad_())
            given, block = ((), lengths) if way == "block" else ((lengths,), None)
            with nullcontext() if block is None else padding(lengths=block):
                losses.append(model(inputs[-1], *given)[0].square().sum())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        gradients[model] = [each.grad for each in (*inputs, *model.parameters())]
    assert current_scope() is None
    for found, expected in zip(gradients[again], gradients[plain], strict=True):
        assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_without_its_mask_is_an_error(reentrant):
    """Also if the block lasts until the backward, since another forward may have run in another
    block.
    """
    model = converted()
    again = Checkpointed(model, use_reentrant=reentrant)
    x = torch.randn(B, T, C, requires_grad=True)
    with padding(None):
        again(x).sum().backward()
    model(x.flatten(0, 1)).sum().backward()
    with padding(MASK):
        y = again(x)
        with pytest.raises(
            RuntimeError,
            match="norm: this forward is being recomputed .* give checkpoint context_fn=",
        ):
            y.sum().backward()
    again = convert_norms(
        Checkpointed(FeedForward(), hands_on=False, use_reentrant=reentrant),
        "batch",
        mask_from="lengths",
    )
    y = again(x, LENGTHS)
    with pytest.raises(
        RuntimeError, match="norm: this forward is being recomputed .* pass the mask as an argument"
    ):
        y.sum().backward()
    again.hands_on = True  # the recomputation sees, as its forward, that the argument is None
    with warns(r"\(argument lengths of inner is None\)"):
        again(x).sum().backward()


# Several masks at once. Those of source and target differ, because equal ones hide which of them
# was taken.

SOURCE_MASK = MASK
TARGET_MASK = MASK.flip(0)


def effect_of_padding(model, call, mask):
    """The greatest difference between the real outputs of ``call(model, x)`` for two contents of
    x at padding.
    """
    x = torch.randn(*mask.shape, C)
    outputs = []
    for content in (0.0, 50.0):
        filled = x.masked_fill(mask[..., None], content)
        outputs.append(call(copy.deepcopy(model), filled)[~mask])
    return (outputs[0] - outputs[1]).abs().max().item()


class Towers(nn.Module):
    """One encoder, which has no argument for a mask, for two texts."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))

    def forward(self, a, a_mask, b, b_mask):
        return self.encoder(a), self.encoder(b)


def test_two_masks_for_one_module_are_refused_by_name():
    model = convert_norms(
        Towers(), "batch", mask_from={"a_mask": "mask", "b_mask": "mask"}, layout="BTC"
    )
    assert norm_report(model)[0].masks == ("argument a_mask or b_mask of the model",)
    x = random_tokens()
    message = (
        "encoder.1: arguments a_mask and b_mask of the model both hold a mask, .* name one .*its "
        "own `with paddi"
    )
    with refuses(message):
        model(x, SOURCE_MASK, x, TARGET_MASK)
    # an argument may stand behind one that is None
    first = lambda model, x: model(x, SOURCE_MASK, x, None)[0]  # noqa: E731
    second = lambda model, x: model(x, None, x, SOURCE_MASK)[0]  # noqa: E731
    assert effect_of_padding(model, first, SOURCE_MASK) == 0
    assert effect_of_padding(model, second, SOURCE_MASK) == 0

    def in_blocks(model, x):
        with padding(SOURCE_MASK):
            model.encoder(x)
        with padding(TARGET_MASK):
            return model.encoder(x)

    assert effect_of_padding(model, in_blocks, TARGET_MASK) == 0
    with padding(None):  # the block decides before anything is in doubt
        model(x, SOURCE_MASK, x, TARGET_MASK)


def test_a_block_wins_for_the_norms_that_it_is_for():
    model = convert_norms(
        EncoderDecoder(), "batch", mask_from={"target_lengths": "lengths"}, layout="BTC"
    )
    source = random_tokens()
    wrong = torch.zeros(B, T, dtype=torch.bool)

    def effect(decoders_mask, decoders_block):
        def run(model, x):
            with padding(SOURCE_MASK, only=["encoder", "none"]), decoders_block, silent():
                return model(source, x, target_lengths=(~decoders_mask).sum(1))

        return effect_of_padding(model, run, TARGET_MASK)

    assert effect(TARGET_MASK, nullcontext()) == 0
    assert effect(wrong, padding(TARGET_MASK, only="decoder.*")) == 0
    assert effect(TARGET_MASK, padding(wrong, only="decoder.*")) > 0.1
    assert effect(wrong, nullcontext()) > 0.1
    with padding(SOURCE_MASK, only="encoder"), padding(TARGET_MASK, only="decoder.*"):
        model(source, source)
    assert [each.line for each in norm_report(model)] == [2, 2]
    with (
        padding(SOURCE_MASK, only="encoder"),
        warns("decoder.norm .* no padding mask has"),
    ):
        model(source, source)


def test_a_block_for_no_norm_that_asks_is_named():
    model = converted()
    x = random_tokens()
    with warns(r"padding\(..., only='lst'\)` was for none .* mask in it: norm, last"):
        with padding(MASK, only="lst"), padding(None, only=["norm", "last"]):
            model(x)
        with padding(None, only=["norm", "last"]), padding(MASK, only="lst"):
            model(x)
    model(x, LENGTHS).sum().backward()
    with silent():
        with padding(MASK, only="lst"):
            model.eval()(x)  # no norm asks


def test_a_block_takes_the_place_of_a_mask_that_cannot_be_read():
    """As the one that Longformer makes, which has a third value."""
    model = converted(mask_from={"lengths": "valid"}, layout="BTC")
    made = torch.where(MASK, -10000.0, 0.0)
    made[:, 0] = 10000.0

    def call(model, x):
        with padding(MASK):
            return model(x, made)

    assert effect_of_padding(model, call, MASK) == 0
    with padding(None):
        model(random_tokens(), made)
    with refuses(r"may be additive; .* run the model in `with padding\(...\)`, whose mask"):
        model(random_tokens(), made)


def test_a_block_that_hides_padding_is_told_once():
    x = random_tokens()
    model = converted()
    full = torch.full_like(LENGTHS, T)
    with silent():
        with padding(None):
            model(x, full)
            model(x)
        with padding(None, only="*"):
            model(x, LENGTHS)
    with padding(None), recorded() as texts:
        model(x, LENGTHS)
        model(x, LENGTHS)
    (text,) = texts
    assert "norm: `with padding(None)` says that there is no padding, and hides" in text
    assert "hides argument lengths of the" in text


def assert_uses_its_mask(model, mask, used, x, *arguments, **more):
    """One training step of the module in ``model``; if the mask is not used, with a warning."""
    expected = nullcontext()
    if not used:
        expected = warns("0.norm .* no padding mask has reached it")
    with expected:
        model[0](x, *arguments, **more).sum().backward()
    model.eval()
    tokens = x[~mask] if used else x.flatten(0, 1)
    assert_close(model[0].norm.running_mean, 0.1 * tokens.mean(0))


@pytest.mark.parametrize(
    ("forward", "used"),
    [
        (lambda self, x, lengths=None, padding_mask=None: self.norm(x), True),
        (lambda self, x, memory, key_padding_mask=None: self.norm(x), False),
        (lambda self, query, key, key_padding_mask=None: self.norm(query), False),
        (lambda self, x, key_padding_mask=None: self.norm(x), True),
        (lambda self, x, encoder_out=None, padding_mask=None: self.norm(x), True),
        # As T5's cross-attention in transformers 4: the mask is the source's.
        (lambda self, x, key_value_states=None, attention_mask=None: self.norm(x), False),
    ],
)
def test_whose_mask_an_argument_is(forward, used):
    """The module in the middle of a model that has no mask, called with the mask of the source."""
    model = convert_norms(nn.Sequential(attending(forward)), "batch", layout="BTC")
    given = {}
    for name in inspect.signature(forward).parameters:
        if name.endswith("padding_mask"):
            given[name] = SOURCE_MASK
        elif name == "attention_mask":
            given[name] = ~SOURCE_MASK
        elif name in ("memory", "key", "key_value_states"):
            given[name] = random_tokens()
    x = random_tokens()
    assert_uses_its_mask(model, SOURCE_MASK, used, x, **given)


@pytest.mark.parametrize(
    "argument", ["src_key_padding_mask", "encoder_padding_mask", "key_padding_mask", "src_lengths"]
)
@pytest.mark.parametrize(
    ("first", "second", "used"),
    [
        ("x", "mem", False),
        ("x", "enc", False),
        ("tgt", "z", False),
        ("x", "pos_emb", True),
        ("x", "speaker", True),
        ("src", "z", True),
        ("x", "y", True),
        ("x", "same", True),
    ],
)
def test_whose_mask_it_is_beside_a_second_sequence(first, second, used, argument):
    """Source and target have equal lengths: no shape tells their masks apart."""
    forward = eval(f"lambda self, {first}, {second}, {argument}=None: self.norm({first})")
    layer = attending(forward)
    model = convert_norms(nn.Sequential(layer), "batch", layout="BTC")
    x = random_tokens()
    other = {"same": x, "speaker": torch.randn(B, C)}.get(second, random_tokens())
    mask = LENGTHS if argument == "src_lengths" else MASK
    assert_uses_its_mask(model, MASK, used, x, other, mask)
    assert norm_report(model)[0].line == (search.ARGUMENT if used else search.NOTHING)


def test_a_mask_that_the_caller_names_counts_beside_a_second_sequence():
    forward = lambda self, x, skip, key_padding_mask: self.norm(x) + skip  # noqa: E731
    layer = attending(forward)
    model = convert_norms(layer, "batch", layout="BTC", mask_from="key_padding_mask")
    x, skip = torch.randn(2, B, T, C)
    model(x, skip, MASK).sum().backward()
    expected = 0.1 * x[~MASK].mean(0)
    assert_close(model.norm.running_mean, expected)


@pytest.mark.parametrize(
    "mask_from", [None, ["src_key_padding_mask", "tgt_key_padding_mask"], "tgt_key_padding_mask"]
)
def test_the_targets_own_mask_beside_a_second_sequence(mask_from):
    """Also in a compiled model."""
    forward = lambda self, x, z, src_key_padding_mask, tgt_key_padding_mask: self.norm(x)  # noqa: E731
    layer = attending(forward)
    model = convert_norms(layer, "batch", layout="BTC", mask_from=mask_from)
    x, z = torch.randn(2, B, T, C)
    for call in (model, torch.compile(copy.deepcopy(model), backend="aot_eager")):
        call(x, z, MASK, MASK.flip(0)).sum().backward()
        call.eval()
        expected = 0.1 * x[~MASK.flip(0)].mean(0)
        assert_close(call.norm.running_mean, expected)


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        return self.norm(hidden_states)


class Block(nn.Module):
    """A layer of T5's decoder."""

    def __init__(self):
        super().__init__()
        self.cross = CrossAttention()

    def forward(
        self, x, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None
    ):
        mask = encoder_attention_mask[:, None, None]
        return self.cross(x, key_value_states=encoder_hidden_states, attention_mask=mask)


def test_a_cross_attention_takes_the_mask_of_the_decoder():
    model = convert_norms(Block(), "batch", mask_from="attention_mask", layout="BTC")
    assert norm_report(model)[0].masks == ("argument attention_mask of the model",)
    source = random_tokens()
    call = lambda model, x: model(x, ~TARGET_MASK, source, ~SOURCE_MASK)  # noqa: E731
    assert effect_of_padding(model, call, TARGET_MASK) == 0


class Heads(nn.Module):
    """A norm of queries, (B, H, T, D) or (B, T, H, D)."""

    def __init__(self, heads_first, heads=4):
        super().__init__()
        self.heads = heads
        self.heads_first = heads_first
        self.norm = nn.LayerNorm(C // heads)

    def forward(self, x, attention_mask=None):
        heads = x.unflatten(-1, (self.heads, -1))
        if not self.heads_first:
            return self.norm(heads).flatten(2)
        return self.norm(heads.transpose(1, 2)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("layout", ["BTC", None])
@pytest.mark.parametrize("form", ["valid", "lengths"])
@pytest.mark.parametrize("heads_first", [True, False])
def test_norms_of_heads(heads_first, form, layout):
    model = convert_norms(
        Heads(heads_first), "batch", mask_from={"attention_mask": form}, layout=layout
    )
    mask = LENGTHS if form == "lengths" else ~MASK
    square = MASK[:, :4].clone()
    square[0] = False  # one sentence is full, so that lengths say T
    mask_of_square = (~square).sum(1) if form == "lengths" else ~square
    meanings = (
        r"may be \(B, T, heads, C\) or \(B, heads, T, C\): run a batch of another length "
        r".*skip='norm'"
    )
    with refuses(rf"norm: \(3, 4, 4, 3\) {meanings}"):
        model(torch.randn(B, 4, C), mask_of_square)
    model(random_tokens(), mask)
    for given, padded in ((mask, MASK), (mask_of_square, square)):
        assert effect_of_padding(model, lambda m, x, given=given: m(x, given), padded) == 0
    with refuses(
        r"its tokens are 3 sequences of length 6, .*is for 3 of length 7; .*='norm'\)",
    ):
        model(torch.randn(B, 6, C), mask)


def test_norms_of_heads_behind_time():
    """(T, B, H, D), as in fairseq."""
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch")
    x = torch.randn(T, B, 4, C)
    mask = MASK.t()
    filled = x.masked_fill(mask[..., None, None], 50.0)
    with padding(MASK):
        model(torch.randn(T, B, 4, C))
        y = copy.deepcopy(model)(x)
        other = copy.deepcopy(model)(filled)
    assert y[~mask].equal(other[~mask])


@pytest.mark.parametrize("norm", ["batch", "power"])
def test_a_mask_of_a_cache_says_what_helps(norm):
    """A step of decoding in training mode: one token, and the mask of all."""
    model = converted(norm, layout="BTC")
    x = torch.randn(B, 1, C)
    mask = {"valid": ~MASK}
    with torch.no_grad(), padding(**mask), pytest.raises(ValueError) as error:
        model(x)
    assert "norm: its tokens are 3 sequences of length 1" in str(error.value)
    assert (
        "is for 3 of length 7; call model.eval() before generating or evaluating; else give it a"
        in str(error.value)
    )
    with (
        padding(**mask),
        refuses("length 7; give it a mask of its own length .*only='norm'"),
    ):
        model(x)
    with torch.no_grad(), padding(**mask), padding(None):
        model(x)
    model.eval()(x, LENGTHS)


def test_lengths_count_a_token_that_the_model_puts_in_front():
    class WithClass(FeedForward):
        def forward(self, x, lengths=None):
            longer = torch.cat([x.new_zeros(B, 1, C), x], 1)
            return super().forward(longer)[:, 1:]

    model = convert_norms(WithClass(), "batch", layout="BTC")
    assert effect_of_padding(model, lambda m, x: m(x, LENGTHS + 1), MASK) == 0
    x = random_tokens()
    with padding(nn.functional.pad(MASK, (1, 0))):
        expected = copy.deepcopy(model)(x)
    assert copy.deepcopy(model)(x, LENGTHS + 1).equal(expected)
    assert not copy.deepcopy(model)(x, LENGTHS).equal(expected)  # no shape tells


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_does_not_take_the_argument_that_a_block_hid(reentrant):
    model = Checkpointed(FeedForward(), use_reentrant=reentrant)
    x = torch.randn(B, T, C, requires_grad=True)
    convert_norms(model, "batch")
    for block in (padding(MASK.flip(0)), padding(None)):
        with block, recorded():
            y = model(x, LENGTHS)
        with pytest.raises(
            RuntimeError,
            match="is being recomputed .* give checkpoint context_fn=padding.context_fn",
        ):
            y.sum().backward()


def assert_reported(line, words, model, call, **options):
    """The report of the first norm, before and after a call of the converted model."""
    convert_norms(model, "batch", layout="BTC", **options)
    assert norm_report(model)[0].line is None
    assert "; last" not in str(norm_report(model)[0])
    with recorded():
        call(model)
    (report,) = [each for each in norm_report(model) if each.name.endswith("norm")]
    assert report.line == line
    assert report.decided == words
    assert str(report).endswith(f"; last: {words} (line {line})")
    assert pickle.loads(pickle.dumps(model)) is not None


def test_the_report_says_which_line_of_the_table_held():
    x = random_tokens()

    def in_a_block(model):
        with padding(lengths=LENGTHS):
            model(x)

    of_model = "argument lengths of the model"
    listed = LENGTHS.tolist()
    assert_reported(1, "the mask of the call", FeedForward(), lambda m: m.norm(x, MASK))
    assert_reported(2, "a block with padding(lengths=...)", FeedForward(), in_a_block)
    assert_reported(4, of_model, FeedForward(), lambda m: m(x, LENGTHS))
    assert_reported(5, f"{of_model} is None", FeedForward(), lambda m: m(x))
    nothing = "no block, and no argument of a module"
    assert_reported(12, nothing, FeedForward(), lambda m: m.norm(x))
    words = f"{of_model} is a list, and no tensor"
    assert_reported(12, words, FeedForward(), lambda m: m(x, lengths=listed))
    words = f"argument padding_mask of the model is {(T,)}, and not (B, T)"
    assert_reported(5, words, Sub(), lambda m: m(x, padding_mask=MASK[0]))
    words = "argument target_lengths of the model"
    call = lambda m: m(x, x, target_lengths=LENGTHS)  # noqa: E731
    forms = {"target_lengths": "lengths"}
    assert_reported(8, words, EncoderDecoder(), call, mask_from=forms)


def test_the_warning_of_a_missing_mask_names_an_argument_that_is_none():
    model = converted(layout="BTC")
    given = r"reached it \(argument lengths of the model is a ndarray, and no tensor\)"
    with warns(given):
        model(random_tokens(), LENGTHS.numpy())


# Silence where one line belongs.


@pytest.mark.parametrize(
    ("given", "count", "remedy"),
    [
        ({"mask": ~MASK}, 1, "is the mask inverted? True is padding"),
        ({"valid": MASK}, 1, "is the mask inverted? 1 is a token"),
        ({"valid": MASK.long()}, 1, "is the mask inverted? 1 is a token"),
        (
            {"additive": torch.zeros(B, T).masked_fill(~MASK, -torch.inf)},
            1,
            "is the mask inverted? 0 is a token, and -inf is padding; torch makes them of a bool "
            "mask in which True is padding: give ~mask if True is a token in it.",
        ),
        ({"lengths": torch.tensor([7, 0, 0])}, 2, "their length is 0."),
        ({"mask": torch.ones(B, T, dtype=torch.bool)}, 3, "is the mask inverted? True is padding"),
        ({"mask": MASK}, 0, ""),
        ({"lengths": LENGTHS}, 0, ""),
    ],
)
@pytest.mark.parametrize("layout", ["BTC", "TBC"])
def test_sentences_without_a_token_are_told_once(given, count, remedy, layout):
    model = converted(layout=layout)
    x = random_tokens()
    x = x if layout == "BTC" else x.transpose(0, 1)
    with recorded() as texts, padding(**given):
        model(x)
        model(x)
    name = next(iter(given))
    expected = (
        f"norm: by padding({name}=...) {count} of 3 sentences consist of padding only: {remedy}"
    )
    assert len(texts) == bool(count)
    assert all(text.startswith(expected) for text in texts)


class Embedded(nn.Module):
    """The first norm sees padding as the same vectors in all sentences."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, C)
        self.positions = nn.Embedding(T, C)
        self.norm = nn.LayerNorm(C)

    def forward(self, ids):
        return self.norm(self.embed(ids) + self.positions(torch.arange(T)))


@pytest.mark.parametrize(
    ("side", "inverted", "is_told"),
    [("right", True, True), ("right", False, False), ("left", False, False), ("left", True, False)],
)
@pytest.mark.parametrize("layout", ["BTC", None])
def test_an_inverted_mask_of_a_batch_that_is_padded_to_a_fixed_length(
    side, inverted, is_told, layout
):
    """Every sentence keeps some tokens by it, and it has the form of padding on the left."""
    ids = torch.randint(1, 50, (B, T))
    mask = torch.arange(T) >= torch.tensor([5, 4, 2])[:, None]
    if side == "left":
        mask = mask.flip(1)
        ids[:, -1] = 7  # a last token that all sentences have, such as the end of a sentence
    model = convert_norms(Embedded(), "batch", layout=layout)
    with recorded() as texts:
        for _ in range(2):
            with padding(~mask if inverted else mask):
                model(ids.masked_fill(mask, 0))
    assert len(texts) == is_told
    for text in texts:
        assert text.startswith("norm: by padding(mask=...) what every")
        assert "is the mask inverted? True is padding" in text


@pytest.mark.parametrize(("inverted", "count"), [(True, 1), (False, 0)])
def test_an_inverted_mask_of_a_padded_batch_whose_padding_differs(inverted, count):
    """As behind attention or dropout: the tokens do not show what padding is."""
    mask = torch.arange(T) >= torch.tensor([5, 4, 2])[:, None]
    model = convert_norms(nn.LayerNorm(C), "batch", layout="BTC")
    with recorded() as texts:
        for _ in range(2):
            with padding(~mask if inverted else mask):
                model(random_tokens())
    assert len(texts) == count
    expected = "LayerNorm: by padding(mask=...) all sentences begin with padding and none ends with"
    assert all(text.startswith(expected) for text in texts)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_norm_of_ones_own_layer_tells_once_of_sentences_without_a_token(batch_first, monkeypatch):
    monkeypatch.setattr(checks, "_told", set())
    x = torch.randn((B, T, C) if batch_first else (T, B, C))
    with recorded() as texts:
        # the third has an empty position
        for given in (None, MASK, MASK | (torch.arange(T) > 5), ~MASK, ~MASK):
            MaskedBatchNorm(C, batch_first=batch_first)(x, given)
        build_norm("rms", C, batch_first=batch_first)(x, ~MASK)
    (text,) = texts
    assert text.startswith(
        "padding_mask: 1 of 3 sentences consist of padding only: is the mask inverted?"
    )


def test_a_later_batch_with_an_empty_sentence_is_told_but_not_by_a_norm_that_uses_no_mask():
    model = converted(layout="BTC")
    x = random_tokens()
    other = converted("rms", layout="BTC")
    with silent():
        model(x, LENGTHS)
        other(x, LENGTHS * 0)
    with warns(
        "norm: by argument lengths of the model 1 of 3 sentences consist of padding",
    ):
        model(x, torch.tensor([7, 4, 0]))


def test_evaluation_of_a_norm_that_counted_no_step_is_told_once():
    x = random_tokens()
    model = converted()
    with recorded() as texts:
        model.eval()(x)
        model(x)
    (text,) = texts
    assert text.startswith(
        "norm is evaluated, but has counted no training step: its running statistics are the initia"
    )
    with silent():
        converted("rms").eval()(x)
        trained = converted()
        trained(x, LENGTHS).sum().backward()
        trained.eval()(x)
        again = converted()
        again.load_state_dict(trained.state_dict())
        again.eval()(x)
        convert_norms(randomized(FeedForward(nn.BatchNorm1d)), "batch").eval()(x.flatten(0, 1))
        recalibrated = converted()
        with torch.no_grad(), recalibrating(recalibrated):
            recalibrated(x, LENGTHS)
        recalibrated.eval()(x)
        torch.export.export(converted().eval(), (x,))
        torch.func.vmap(converted().eval())(x)
        converted().to("meta").eval()(x.to("meta"))
    lost = converted()
    plain = FeedForward()
    plain.load_state_dict(trained.state_dict(), strict=False)
    # as from_pretrained of an unconverted model drops the statistics
    lost.load_state_dict(plain.state_dict())
    with warns("convert the model before you load it"):
        lost.eval()(x)


def test_prep_batch_evaluated_before_its_fade_has_ended_is_told_once():
    model = converted("prep-batch", fade_updates=4)
    x = random_tokens()
    with recorded() as texts:
        for _ in range(4):
            model(x, LENGTHS).sum().backward()
        copy.deepcopy(model).eval()(x)
    assert not texts
    model = converted("prep-batch", fade_updates=4)
    model(x, LENGTHS).sum().backward()
    with recorded() as texts:
        for _ in range(2):
            model.eval()(x)
    (text,) = texts
    assert text.startswith(
        "norm is evaluated at lambda = 0.75: until it is 0, after fade_updates=4, evaluation lacks "
        "the LayerNorm that training uses. Give fade_updates="
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3, 4], r"padding\(mask=...\): expected a tensor, got list; .*lengths=torch.tensor"),
        (LENGTHS, "or lengths= if"),
    ],
)
def test_numbers_of_tokens_in_the_place_of_a_mask_name_lengths(given, message):
    with refuses(message):
        padding(given)


def test_the_table_of_the_page_has_the_lines_of_the_search():
    page = (Path(__file__).parents[2] / "docs/own_model.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|$", page, re.M)
    found = [int(number) for number, _, _ in rows]
    assert found == [*range(1, 13)]
    words = {
        search.GIVEN: "`norm(x, mask)`",
        search.BLOCK: "`with padding(...)` block around the call",
        search.ARGUMENT: "(B, T)",
        search.NONE: "… None",
        search.TWO: "two arguments have a value",
        search.OF_TARGET: "attends to other tokens",
        search.NOTHING: "nothing applies",
    }
    for number, expected in words.items():
        assert expected in rows[number - 1][1]
    for prefixes, column in ((search.ATTENDED_NAMES, 0), (search.TARGET_NAMES, 1)):
        _, _, names = rows[search.OF_TARGET - 1]
        named = re.findall(r"`(\w+_)\.\.\.`", names.partition(";")[2 * column])
        assert named
        assert all(name.startswith(prefixes) for name in named)

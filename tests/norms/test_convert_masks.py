"""convert_norms: where the masks of the norms come from, and what tells of a mask that is missing or wrong."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import convert_norms, norm_report, padding
from pn_fairseq.norms.padding import current_scope

from ..pairwise import in_pairs
from .converted import LENGTHS, MASK, SOME, B, C, FeedForward, T, randomized


class Sub(nn.Module):
    """A module whose forward has a mask, also one of another length."""

    def __init__(self):
        super().__init__()
        self.norm, self.pool = nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x, padding_mask=None, *, lengths=None):
        return self.pool(self.norm(x)[:, ::2])


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.LayerNorm(C), Sub()

    def forward(self, x, attention_mask, halved=None, fail=False):
        x = self.first(x)
        if fail:
            raise KeyError("stop")
        return self.inner(x, halved)


def test_the_innermost_module_with_the_argument_decides():
    model = convert_norms(Outer(), "batch", mask_from=["padding_mask", "attention_mask"], skip="*pool")
    assert norm_report(model)[1].masks == ("argument padding_mask of inner", "argument attention_mask of the model")
    line = str(norm_report(model)[1])
    assert "argument padding_mask of inner (if None, only padding(...)), else argument attention_mask" in line
    x = torch.randn(B, T, C)
    filled = x.masked_fill(MASK[..., None], 1e4)
    valid = (~MASK).int()
    for given in ((valid, MASK), (valid, torch.zeros(B, T).masked_fill(MASK, -torch.inf))):
        y, expected = (copy.deepcopy(model)(each, *given) for each in (filled, x))
        assert y[~MASK[:, ::2]].equal(expected[~MASK[:, ::2]])
    with pytest.raises(KeyError):
        model(x, valid, fail=True)  # leaves no scope behind
    with pytest.warns(UserWarning, match="first takes statistics .* no padding mask has reached it: padding"):
        copy.deepcopy(model).first(x)


@pytest.mark.parametrize("fail", [False, True])
def test_the_scopes_of_two_conversions_end(fail):
    model = convert_norms(Outer(), "layer", mask_from="attention_mask", only="first", zero_padding=True)
    convert_norms(model, "batch", mask_from="attention_mask", only="inner.norm")
    with pytest.raises(KeyError) if fail else nullcontext():
        model(torch.randn(B, T, C), (~MASK).int(), fail=fail)
    assert current_scope() is None


def test_an_argument_that_is_none_hides_the_masks_of_modules_around():
    """With the warning, as the inner module may have other tokens; a block holds there."""
    x = torch.randn(B, T, C)
    filled, real = x.masked_fill(MASK[..., None], 1e4), ~MASK[:, ::2]
    for form, mask, full in (
        ("valid", (~MASK).int(), torch.ones_like(MASK, dtype=torch.int)),
        ("lengths", LENGTHS, torch.full_like(LENGTHS, T)),
    ):
        arguments = {"padding_mask": "mask", "attention_mask": form}
        model = convert_norms(Outer(), "batch", mask_from=arguments, skip="*pool")
        with pytest.warns(UserWarning, match=r"inner.norm .* reached it \(argument padding_mask of inner is None\)"):
            hidden = copy.deepcopy(model)(filled, mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x, full)  # Hugging Face's models hand None on if there is no padding
            with padding(MASK):
                y, expected = (copy.deepcopy(model)(each, mask) for each in (filled, x))
        assert y[real].equal(expected[real]) and not y[real].equal(hidden[real])
    model = convert_norms(Outer(), "batch", mask_from=arguments, only="inner.norm")
    with pytest.warns(UserWarning, match="inner.norm"):
        model(x, full + 2)  # of other sequences


class Attending(nn.Module):
    """A layer of a decoder without a mask of its own tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x, encoder_out=None, src_lengths=None):
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.LayerNorm(C), Attending()

    def forward(self, x, y, src_lengths=None, lengths=None, target_lengths=None, attends=True):
        memory = self.encoder(x)
        kinds = {"dict": {"memory": memory}, "speaker": memory[:, 0], "TBC": memory.transpose(0, 1), True: memory}
        attended = kinds.get(attends)
        return self.decoder(y, attended, src_lengths)


@pytest.mark.parametrize(
    ("argument", "source_length", "attends", "used"),
    [
        ("src_lengths", T, True, False),
        ("src_lengths", T, False, True),
        ("src_lengths", T, "speaker", True),
        ("lengths", T, True, False),
        ("lengths", T, "dict", False),
        ("lengths", T, "TBC", False),
        ("lengths", T + 1, True, True),
        ("target_lengths", T, True, True),
    ],
)
def test_a_mask_of_the_source_is_none_for_what_attends_to_it(argument, source_length, attends, used):
    """Where source and target have equal lengths, no shape tells their masks apart."""
    model = convert_norms(EncoderDecoder(), "batch", mask_from={argument: "lengths"}, layout="BTC", only="decoder*")
    source, target = torch.randn(B, source_length, C), torch.randn(B, T, C)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(source, target, attends=attends, **{argument: LENGTHS}).sum().backward()
    assert ["no padding mask has reached it: " in str(each.message) for each in caught] == [True] * (not used)
    assert norm_report(model)[-1].masks == (f"argument {argument} of the model",)  # encoder_out may be None
    model.eval()
    tokens = target[~MASK] if used else target.flatten(0, 1)
    torch.testing.assert_close(model.decoder.norm.running_mean, 0.1 * tokens.mean(0))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, memory: self.norm(x),
        lambda self, x, encoder_outputs: self.norm(x),
        lambda self, x, enc_output: self.norm(x),
    ],
)
def test_names_of_what_a_module_attends_to(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = type("Decoder", (Attending,), {"forward": forward})()

        def forward(self, x, src_lengths):
            return self.decoder(x, x)

    model = convert_norms(Model(), "batch", mask_from="src_lengths", layout="BTC")
    assert norm_report(model)[0].masks == ()
    x = torch.randn(B, T, C)
    with pytest.warns(UserWarning, match="no padding mask has reached it"):
        model(x, LENGTHS).sum().backward()
    torch.testing.assert_close(model.decoder.norm.running_mean, 0.1 * x.mean((0, 1)))


def test_the_decoder_of_torchs_transformer_does_not_take_the_mask_of_the_source():
    make = lambda: nn.Transformer(C, 2, 1, 1, 8, 0.0, batch_first=True)  # noqa: E731
    source, target = torch.randn(2, B, T, C)
    masks = {"src_key_padding_mask": MASK, "tgt_key_padding_mask": MASK.flip(0)}
    model = convert_norms(make(), "batch", mask_from="src_key_padding_mask", layout="BTC")
    assert [bool(each.masks) for each in norm_report(model)] == [each.name[:2] == "en" for each in norm_report(model)]
    with pytest.warns(UserWarning, match="decoder.layers.0.norm1 .* no padding mask has reached it: "):
        model(source, target, src_key_padding_mask=MASK)
    model, real = convert_norms(make(), "batch", mask_from=list(masks), layout="BTC"), ~MASK.flip(0)
    filled = target.masked_fill(~real[..., None], 1e4)
    y, expected = (copy.deepcopy(model)(source, each, **masks)[real] for each in (filled, target))
    assert y.equal(expected)


def test_functions_of_an_argument():
    ids, x = torch.where(MASK, 1, 5), torch.randn(B, T, C)
    additive = torch.zeros(B, 1, 1, T).masked_fill(MASK[:, None, None], torch.finfo(torch.float32).min)
    for form, mask in ((lambda ids: ids == 1, ids), ("valid", additive)):
        model = convert_norms(FeedForward(), "batch", mask_from={"lengths": form})
        y, expected = (copy.deepcopy(model)(each, lengths=mask) for each in (x.masked_fill(MASK[..., None], 1e4), x))
        assert y[~MASK].equal(expected[~MASK])


def test_a_mask_of_another_length_names_the_module():
    model = convert_norms(Outer(), "batch", mask_from=["padding_mask", "attention_mask"])
    x = torch.randn(B, T, C)
    with pytest.raises(ValueError, match=r"inner.pool: .* 3 sequences of length 4, .* is for 3 of length 7; .*skip="):
        model(x, (~MASK).int(), MASK)
    for mask in ({"mask": MASK}, {"lengths": LENGTHS}):
        with padding(**mask), pytest.raises(ValueError, match="inner.pool.* length 4, and .* 3 of length 7"):
            convert_norms(Outer(), "batch")(x, None)
    model = convert_norms(Outer(), "batch", skip="inner.norm")
    with padding(MASK):
        with pytest.raises(ValueError, match="first: its tokens are 4 sequences of length 7, and .* is for 3"):
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
    ],
)
def test_wrong_masks(arguments, message):
    with pytest.raises(ValueError, match=message):
        padding(**arguments)


def test_wrong_additive_mask():
    with (
        padding(additive=torch.ones(B, T)),
        pytest.raises(RuntimeError, match="holds 0 at tokens and at most -10000 at padding"),
    ):
        convert_norms(nn.LayerNorm(C), "batch")(torch.randn(B, T, C))


@pytest.mark.parametrize("form", ["valid", "lengths", "additive"])
def test_a_block_whose_tensor_is_refilled_has_another_mask(form):
    x, model = torch.randn(B, T, C), convert_norms(FeedForward(), "batch")
    given = {"valid": ~MASK, "lengths": LENGTHS.clone(), "additive": MASK * torch.tensor(-torch.inf).nan_to_num()}[form]
    block = padding(**{form: given})
    for flipped in (MASK, MASK.flip(0)):
        with padding(flipped):
            expected = copy.deepcopy(model)(x)
        with block:
            assert model(x).equal(expected)
        given.copy_(given.flip(0))


def test_one_warning_for_a_model_without_any_mask():
    model = convert_norms(FeedForward(), "batch", zero_padding=True)
    x = torch.randn(B, T, C)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with padding(None):
            model(x)
        with padding(MASK):
            model(x)
        model(x.flatten(0, 1))
        model.eval()(x)
        convert_norms(FeedForward(), "layer", zero_padding=True)(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train()(x)
        model(x)
    assert len(caught) == 1 and str(caught[0].message).startswith("norm takes statistics over the tokens of a batch")


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_hooks_of_a_model_serve_copies_of_its_norms_and_no_other_model(copied):
    """As in depth up-scaling, and in PEFT's modules_to_save."""
    model = convert_norms(Stack(), "batch", mask_from="attention_mask")
    model.layers.append(copied(model.layers[1]))
    model.layers[0].norm = nn.Sequential(copied(model.layers[0].norm))
    model = copied(model)
    assert [each.name for each in norm_report(model)][::5] == ["layers.0.norm.0", "layers.2.last"]
    assert all(each.masks == ("argument attention_mask of the model",) for each in norm_report(model))
    x, valid = torch.randn(B, T, C), (~MASK).long()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, expected = (copied(model)(each, valid)[~MASK] for each in (x, x.masked_fill(MASK[..., None], 1e4)))
    assert y.equal(expected)
    model.layers[0] = convert_norms(FeedForward(), "batch")
    with pytest.warns(UserWarning, match="norm takes statistics"):
        model(x, valid)


class Known(nn.Module):
    """Its class is given the name of a package whose masks are known."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)), nn.LayerNorm(C)

    def forward(self, x, mask=None, lengths=None):
        return self.norm(self.inner(x))


@pytest.mark.parametrize("package", ["joeynmt.encoders", "of_a_user"])
def test_masks_of_known_names_are_found_without_being_named(package):
    x, expected = torch.randn(B, T, C), convert_norms(Known(), "batch", mask_from="lengths")
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
    with pytest.warns(UserWarning, match="inner.1 takes statistics"):
        convert_norms(known(), "batch", mask_from=())(x, **given)


class Checkpointed(nn.Module):
    def __init__(self, inner, hands_on=True, **options):
        super().__init__()
        self.inner, self.hands_on, self.options = inner, hands_on, options

    def forward(self, x, lengths=None):
        given = (lengths,) if self.hands_on and lengths is not None else ()
        return checkpoint(self.inner if self.hands_on else self.inner.forward, x, *given, **self.options)


#: Way of a mask to a recomputation -> the options of ``checkpoint``.
MASK_GIVEN_BY = {
    "argument, reentrant": {"use_reentrant": True},
    "argument": {"use_reentrant": False},
    "block": {"use_reentrant": False, "context_fn": padding.context_fn},
    "argument of a module around": {"use_reentrant": False, "context_fn": padding.context_fn},
}


@in_pairs(norm=SOME, way=list(MASK_GIVEN_BY), together=[True, False])
def test_recomputation_has_the_mask_of_its_forward(norm, way, together):
    """Also where several forwards run before one backward, and one of them had no padding."""
    plain = convert_norms(randomized(FeedForward()), norm, mask_from="lengths")
    around = way == "argument of a module around"
    again = Checkpointed(randomized(FeedForward()), hands_on=not around, **MASK_GIVEN_BY[way])
    again = convert_norms(again, norm, mask_from="lengths")
    again.inner.load_state_dict(plain.state_dict())
    x = torch.randn(B, T, C)
    gradients = {}
    for model in (plain, again):
        inputs, losses = [], []
        for lengths in (LENGTHS, LENGTHS.flip(0), torch.full_like(LENGTHS, T)):
            inputs.append(x.clone().requires_grad_())
            given, block = ((), lengths) if way == "block" else ((lengths,), None)
            with padding(lengths=block):
                losses.append(model(inputs[-1], *given)[0].square().sum())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        gradients[model] = [each.grad for each in (*inputs, *model.parameters())]
    assert current_scope() is None
    for found, expected in zip(gradients[again], gradients[plain], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_without_its_mask_is_an_error(reentrant):
    """Also if the block lasts until the backward, since another forward may have run in another block."""
    model = convert_norms(FeedForward(), "batch")
    again, x = Checkpointed(model, use_reentrant=reentrant), torch.randn(B, T, C, requires_grad=True)
    with padding(None):
        again(x).sum().backward()
    model(x.flatten(0, 1)).sum().backward()
    with padding(MASK):
        y = again(x)
        with pytest.raises(RuntimeError, match="norm: this forward is being recomputed .* give checkpoint context_fn="):
            y.sum().backward()
    again = convert_norms(
        Checkpointed(FeedForward(), hands_on=False, use_reentrant=reentrant), "batch", mask_from="lengths"
    )
    y = again(x, LENGTHS)
    with pytest.raises(RuntimeError, match="norm: this forward is being recomputed .* pass the mask as an argument"):
        y.sum().backward()
    again.hands_on = True  # the recomputation sees, as its forward, that the argument is None
    with pytest.warns(UserWarning, match=r"\(argument lengths of inner is None\)"):
        again(x).sum().backward()

"""``pn export``: encoder and decoder step of a checkpoint as files for ONNX or ``torch.export``."""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.checkpoints import CheckpointError, load_checkpoint
from pn_fairseq.common.command import ArgumentParser, UserError, without_fairseqs_log
from pn_fairseq.common.files import check_can_be_folder
from pn_fairseq.pipeline import add_norm_module, outdated

DESCRIPTION = (
    "Write the encoder and one decoder step of a transformer_pn checkpoint as two files, to decode "
    "without fairseq and without this package. Norms with running statistics are folded into the "
    "linear layers."
)

EPILOG = """\
example:
  %(prog)s checkpoints/averaged.pt --onnx exported

docs/own_model.md describes the inputs and results of both files. The logits that the written files
give on random sentences are compared with the checkpoint's; a difference of more than 1e-4 of the
largest logit is an error. --onnx needs onnx, onnxscript and onnxruntime. CHECKPOINT is read without
executing code from it.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="pn export", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint of transformer_pn"
    )
    parser.add_argument(
        "--onnx", metavar="DIR", type=Path, help="write DIR/encoder.onnx and DIR/decoder.onnx"
    )
    parser.add_argument(
        "--pt2", metavar="DIR", type=Path, help="write DIR/encoder.pt2 and DIR/decoder.pt2"
    )
    add_norm_module(parser)
    args = parser.parse_args(argv)
    folders = {kind: getattr(args, kind) for kind in ("onnx", "pt2") if getattr(args, kind)}
    if not folders:
        raise UserError("nothing to write: give --onnx DIR, --pt2 DIR or both")
    for kind, folder in folders.items():
        check_can_be_folder(folder, f"--{kind}")
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if "onnx" in folders and missing:
        raise UserError(
            f"--onnx needs {' and '.join(missing)}; install with: pip install {' '.join(missing)}"
        )
    state = load_checkpoint(args.checkpoint)
    outdated.note_on_average("export", [args.checkpoint])
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    with without_fairseqs_log(logging.CRITICAL):
        # Imported here, so that --help and a misspelt name are answered at once.
        from pn_fairseq.models.export import (
            compare_graphs,
            export_graphs,
            exportable,
            save_onnx,
            save_pt2,
        )
        from pn_fairseq.models.from_checkpoint import with_norm_module

        model, folded, line = exportable(
            with_norm_module(state, args.norm_module), str(args.checkpoint)
        )
        print(line)
        graphs = export_graphs(folded)
        for kind, folder in folders.items():
            save = {"onnx": save_onnx, "pt2": save_pt2}[kind]
            difference = compare_graphs(model, *save(*graphs, folder))
            files = [folder / f"{name}.{kind}" for name in ("encoder", "decoder")]
            if not difference.accepted:
                for file in files:
                    file.unlink()
                raise CheckpointError(
                    f"{args.checkpoint}: cannot be exported in float32: {difference}"
                )
            print(f"{difference}\nwrote {files[0]} and {files[1]}")

"""Turn fairseq's JSON records on stdin into one short line each: progress.py TOTAL_UPDATES."""

import json
import signal
import sys

# Ctrl-C goes to the training, too, whose last words are still to be read; the end of the input ends this.
signal.signal(signal.SIGINT, signal.SIG_IGN)
total = int(sys.argv[1])
for line in sys.stdin:
    start = line.find("{")
    try:
        record = json.loads(line[start:]) if start >= 0 else {}
    except json.JSONDecodeError:
        continue
    if "valid_num_updates" in record:
        updates, loss = int(record["valid_num_updates"]), float(record["valid_nll_loss"])
        print(f"  update {updates:5d} of {total}, validation loss {loss:.3f} bits per token", flush=True)
    elif "ups" in record:
        updates, loss, speed = int(record["num_updates"]), float(record["loss"]), float(record["ups"])
        left = f", {max(total - updates, 0) / speed / 60:.1f} minutes left" if speed else ""
        print(f"  update {updates:5d} of {total}, loss {loss:.3f}, {speed:.1f} updates/s{left}", flush=True)

"""What a user types wrong: exit code 2, one line that says what is wrong, and nothing is
written.
"""

import shlex
import shutil
import sys

import pytest
import torch

from .fixtures.reports import make_run
from .fixtures.runs import small_run
from .scripts_helpers import ROOT, assert_refused, cut_corpus, in_process
from .tables import rows

#: A row is the words after ``pn``, in the folder of ``place``, and what the line says; ``;`` stands
#: between several.
TABLE = """
average                                               | one of the arguments --run --inputs is required
average --run /nowhere                                | there is no directory '/nowhere'
average --run rn                                      | there is no directory 'rn', did you mean 'run'?
average --run run average_last=3                      | unrecognized arguments: average_last=3, did you mean '--last 3'?
average --run x --lst 2                               | did you mean '--last'
average --run x --num-update-checkpoints 2            | --num-update-checkpoints, did you mean '--last 2'?
average --inputs none --num-epoch-checkpoints=10      | did you mean '--last 10'?
average --run nowhere --lst 2                         | did you mean '--last'
average --inputs files/none --last 2 --output out.pt  | files/none
average --inputs files --output out.pt --last 0       | --last; '0'
average --inputs files --output out.pt                | is a folder; --last
average --inputs files                                | --output
average --inputs w1.pt w2.pt --output out.pt --last 2 | --last; files
average --inputs w1.pt none.pt --output out.pt        | none.pt; No such file
average --inputs w1.pt w2.pt ./../place/w1.pt --output out.pt | given twice
average --inputs w2.pt link.pt --output out.pt        | given twice
average --inputs w1.pt w2.pt --output w2.pt           | is one of the inputs
average --inputs w1.pt w2.pt --output link.pt         | is one of the inputs
average --inputs w1.pt w2.pt --output files           | not a regular file
average --inputs w1.pt w2.pt --output none/out.pt     | no directory
average --inputs files --last 2 --output files/checkpoint2.pt | is one of the inputs
average --inputs w1.pt --output out.pt --recalibrate  | --recalibrate needs DATA
average --inputs w1.pt --output out.pt --recalibrate /nowhere | /nowhere; fairseq-preprocess
average --inputs w1.pt --output out.pt --recalibrate data --batches 0 | --batches; '0'
average --inputs w1.pt --output out.pt --recalibrate data --batches -3 | --batches
average --inputs w1.pt --output out.pt --recalibrate data --batches some | --batches; some
average --inputs w1.pt --output out.pt --batches 3    | --batches goes with --recalibrate
average --inputs w1.pt --output out.pt --run x        | not allowed with argument
average --inputs w1.pt --output out.pt --norm-module none.py | --norm-module; there is no file; none.py
average --inputs w1.pt --output out.pt --unknown      | unrecognized arguments: --unknown; --help
evaluate-lm --run run                                 | is not the run of a language model
evaluate-lm                                           | are required: --run
export w1.pt                                          | --onnx DIR, --pt2 DIR
figures nothing --output out                          | there is no directory 'nothing'
fold w1.pt                                            | OUTPUT
fold none.pt out.pt                                   | none.pt; No such file
generate                                              | --run; --help
generate --run data                                   | is not a training run: it has no config.yaml
generate --run .                                      | '.' is not a training run; it is a folder of runs, name one: files, lm, run, scored
generate --run run/checkpoints                        | 'run/checkpoints' is inside of a run, did you mean 'run'?
generate --run run/checkpoints/averaged.pt            | is a checkpoint; name its run 'run'; --checkpoint
generate --run group                                  | 'group' is a file; name a folder
generate --run run generation.beam=2                  | unrecognized arguments: generation.beam=2, did you mean '--beam 2'?
generate --run run model.dropout=0.1                  | model.dropout=0.1, a setting of 'pn train'
generate --run run --ranks two                        | --ranks; 'two'
generate --run run --subset train2                    | no subset 'train2'
generate --run run --subset ../test                   | no subset '../test'
generate --run run --beam 0                           | --beam; '0'
generate --run run --beam ''                          | --beam; ''
generate --run run --lenpen x                         | --lenpen; 'x'
generate --run run --max-len-a x                      | --max-len-a; 'x'
generate --run run --batch-size many                  | --batch-size; 'many'
generate --run run --max-tokens -1                    | --max-tokens; '-1'
generate --run run --checkpoint none.pt               | 'none.pt'; pn average; checkpoints has averaged.pt
generate --run run --checkpoint a:b.pt                | colon
generate --run run --norm-module none.py              | --norm-module; there is no file; none.py
generate --run run --gen-subset valid                 | did you mean '--subset valid'?
generate --run run --path w1.pt                       | did you mean '--checkpoint w1.pt'?
generate --run run --bean 3                           | --bean; did you mean '--beam'; --help
generate --run run --bean 3 --path w1.pt              | --bean, did you mean '--beam'
generate --run run --remove-bpe                       | unrecognized arguments: --remove-bpe: leave it out, subwords are always joined
generate --run run --beam 3 --post-process sentencepiece | --post-process: leave it out
generate --run models/lm                                 | 'models/lm' is the run of a language model: pn evaluate-lm --run models/lm
translate --run models/lm                                | language model: pn evaluate-lm --run models/lm
score --run models/lm                                    | language model: pn evaluate-lm --run models/lm
generate --run run --output run                       | refusing to overwrite; place/run'
generate --run run --output data                      | refusing to overwrite; place/data'
prepare text --corpus text --source es --target en --dest text | --corpus and --dest are both; place/text'
prepare text --corpus text --source es --target en --dest run | place/run' is a run of pn train
fold w1.pt w1.pt                                      | is one of the inputs
fold w1.pt none/out.pt                                | none/out.pt; cannot be written
import-release none.pt out.pt                         | none.pt; No such file
import-release w1.pt out.pt                           | is not a checkpoint of the authors' release (it holds no args)
import-release w2.pt link.pt                          | is one of the inputs
import-release w1.pt none/out.pt                      | none/out.pt; cannot be written
norms unifid                                          | did you mean 'unified'
norms --norm-module ''                                | norm module '' is not a file
norms --norm-module none.py                           | none.py' is not a file; name the file of the norms
prepare                                               | --help
prepare verse                                         | unknown 'verse'; did you mean 'verses'?
prepare none.py                                       | there is no recipe 'none.py'
prepare empty.py                                      | is no recipe: it has no CONFIG
prepare broken.py                                     | error: broken.py: line 1: ZeroDivisionError: division by zero
prepare unclosed.py                                   | error: unclosed.py: SyntaxError: '(' was never closed (unclosed.py, line 1)
prepare others/verses.py                              | 'others/verses.py' has the name of another recipe; recipes/verses.py'; give the file another name
prepare unnamed.py                                    | error: unnamed.py: line 2: ValueError: an Experiment needs a configuration
reproduce broken.py                                   | error: broken.py: line 1: ZeroDivisionError: division by zero
reproduce others/verses.py                            | 'others/verses.py' has the name of another recipe
reproduce --study recipe.yaml                         | empty.py is no recipe: it has no CONFIG
prepare text --corpus                                 | --corpus; expected one argument
prepare text --corpus text --source es --dest out     | --source and --target are required
prepare text --corpus /nowhere --source es --target en --dest out | /nowhere
prepare text --corpus text --source es --target es --dest out | --source and --target are both 'es'
prepare text --corpus text --source es --target en --dest out --bpe many | --bpe: must be a whole number of at least 1
prepare text --corpus text --source es --target en --dest out --like data --keep-case | leave out --keep-case
prepare text --corpus text --source es --target en --dest out --protect group | group: line 3 has a group: write (?:...)
prepare text --corpus text --source es --target en --dest out --protect blank | blank has no regular expression
prepare text --corpus text --source es --target en --dest out --codes blank | blank is empty
prepare text --corpus text --source es --target en --dest out --codes files | --codes '; files' is a folder; name a file
prepare text --corpus text --source es --target en --dest out --codes none | --codes; none: No such file or directory
prepare text --corpus text --source es --target en --dest out --protect text | --protect '; text' is a folder; name a file
prepare text --corpus dev --source es --target en --dest out | there is no; dev/valid.es; there are dev.en, dev.es, train.en, train.es
prepare text --trainpref text/train --source es --target en | did you mean '--corpus text'?
prepare text --corpus text --source es --target en --testpref text/test2 | did you mean '--test test2'?
prepare text --corpus text --source-lang es           | did you mean '--source es'?
prepare text --corpus text --src es --tgt en --dest out | did you mean '--source es --target en'?
prepare text --corpus text -s es -t en --dest out     | did you mean '--source es --target en'?
prepare text --corpus text -s es -t en                | did you mean '--source es --target en'?
prepare text --corpus text --source spa --target en --dest out | there is no; text/train.spa; there are train.en, train.es
prepare text --corpus text/train.es --source es --target en --dest out | --corpus: '; train.es' is a file; name a folder
prepare text --corpus txt --source es --target en --dest out | --corpus: there is no directory; did you mean '; text'?
prepare text --source-lang=es --target-lang en --destdir out --corpus text | did you mean '--source es --target en --dest out'?
prepare --source-lang es --target-lang en text        | the corpus comes before --source-lang
prepare text --corpus text --source es --target en --dest group | --dest '; group' is a file
prepare verses --dest w1.pt                           | w1.pt' is a file; name a folder
prepare text --corpus text --like data --dest data    | --like and --dest are both '; data'
prepare text --corpus text --like dta --dest out      | dta' is not prepared data: there is no such folder; data, did you mean 'data'?
prepare text --corpus text --like files --dest out    | files' is not prepared data: it has no settings.txt and no bin; place': data
prepare text --corpus text --dest out --test new      | --dest '; out' is not prepared data: there is no such folder
prepare text --corpus text --dest out --like .        | place' is not prepared data: it has no bin
prepare text --corpus text --source es --target en --dest out --segmentation unigram | --segmentation: unknown 'unigram'
prepare iwslt14 --dest out --archive none.tgz         | none.tgz; (--archive); it comes from https://dl.
prepare iwslt14 --dest group/data --archive w1.pt     | group/data': '; group' is a file; name a folder
prepare iwslt15_envi --dest out --archive text        | train.vi; (--archive); nlp.stanford.edu
prepare iwslt14 --dest out --moses /nowhere           | --moses /nowhere
prepare text --corpus text --source es --target en --dest out --tokenized --moses /nowhere | text comes in tokens
prepare iwslt14 --dest out --workers 0                | --workers
prepare multi30k                                      | --corpus; --help
prepare multi30k --corpus nowhere --dest out          | nowhere; --corpus
prepare ptb                                           | --corpus; --help
prepare ptb --corpus text --dest out                  | ptb.train.txt
report                                                | RUN; --output
report scored                                         | --output
report scored nowhere --output out                    | there is no directory 'nowhere'
report scored lm --output out                         | some runs are language models and some are not
report scored text --output out                       | 'text' is not a run; config.yaml
report scored text/../scored --output out             | given twice (also as 'scored')
report scored --output group                          | --output 'group' is a file; name a folder
report scored --output group/out                      | --output 'group/out': 'group' is a file; name a folder
report scored scored --output out                     | 'scored' is given twice
report scored --output out --subset tset              | unknown subset 'tset', did you mean 'test'?; there are test
report scord --output out                             | there is no directory 'scord', did you mean 'scored'?
report . --output out                                 | '.' is not a training run; it is a folder of runs, name one: files, lm, run, scored
report scored --output out --paper wmt99              | unknown table 'wmt99'; powernorm-1
report scored --output out --paper ptb                | --paper ptb is of language models, unlike the runs
report scored --output out --paper no.yaml            | no.yaml: No such file
report scored --output out --paper scored/config.yaml | config.yaml has no list of rows
report scored --output out --paper half.yaml          | half.yaml cannot be read as a published table
report scored --output out --paper row.yaml           | row 1 is not a mapping of label, norm
report scored --output out --paper label.yaml         | row 1 has no 'label'
report scored --output out --paper key.yaml           | row 1: unknown key 'blue', did you mean 'bleu'?
report scored --output out --resamples 0              | --resamples
report scored --output out --planned PN               | --planned 'PN'; MEASURE is bleu
report scored --output out --planned PNV:loss         | --planned PNV: there is no such system
reproduce compare_norms                               | pn reproduce --study compare_norms
reproduce --study none.yaml --dry-run                 | there is no; none.yaml; compare_masks
reproduce --study compare_mask --dry-run              | did you mean 'compare_masks'?
reproduce --study=compare_norms --multi30k /nowhere   | unrecognized arguments: --multi30k
reproduce nothing --data data --dry-run               | there is no; verses_es_en
reproduce verses --dry-run --archive text             | unrecognized arguments: --archive
reproduce iwslt14 --dry-run --norms 'ln pnw'          | unknown norm 'pnw'; did you mean 'pn'?; ln, bn, pnv, pn
reproduce iwslt14 --dry-run --norms ln,pnw            | unknown norm 'pnw'; did you mean 'pn'?
reproduce iwslt14 --dry-run --norms ln pn             | unexpected argument 'pn', did you mean '--norms ln,pn'?
reproduce verses_es_en --norms ln --seeds 1 2 3 --dry-run | unexpected argument '2', did you mean '--seeds 1,2,3'?
reproduce verses_es_en --norms ln pn                  | did you mean '--norms ln,pn'?
reproduce verses --dry-run --seeds 1-3                | '1-3' is not a list of seeds, did you mean '1,2,3'?
reproduce verses --dry-run --seeds 4,1..2             | '1..2' is not a list of seeds, did you mean '1,2'?
reproduce verses --dry-run optimization.max_update = 9 | did you mean 'optimization.max_update=9'?
reproduce verses_es_en --dry-run --data data/bin      | data/bin' is inside of prepared data, did you mean '; data'?
reproduce verses --dry-run pn                         | unexpected argument 'pn': settings are key=value
reproduce verses --dry-run --max-update 100           | did you mean 'optimization.max_update=100'?
reproduce iwslt14 --dry-run --norms ,                 | --norms; at least one
reproduce iwslt14 --dry-run --table powernorm-5       | table 'powernorm-5'; did you mean 'powernorm-4'; adanorm-1
reproduce iwslt14 --dry-run --table powernorm-1 --norms pn  | --table and --norms; one of them
reproduce iwslt14 --dry-run --table powernorm-1 --size tiny | --table and --size; one of them
reproduce iwslt14 --dry-run --seeds '1 x'             | --seeds; 'x'
reproduce iwslt14 --dry-run --seeds 2,1,2 --norms pn  | pn_seed2; twice
reproduce verses_lm --dry-run --models lstm           | unknown model 'lstm'; transformer_lm, tensorized_lm
score                                                 | --run; --compare; --hyp
score --compare one                                   | two runs or more
score --compare one two --run three                   | --compare; --run; not allowed
score --hyp one --ref two --compare three             | --compare; --hyp; not allowed
score --hyp one --ref two --subset valid              | --subset needs --run or --compare
score --compare one two --output x                    | --output needs --run
score --hyp one --ref two --compound-split            | --compound-split needs --run or --tokenized
score --compare one two --resamples 0                 | --resamples; at least 1
score --compare one two                               | there is no directory 'one'
score --run one --resamples 10                        | --resamples; --compare
score --run rn                                        | there is no directory 'rn', did you mean 'run'?
score --hyp group --ref group blank                   | blank: 0 lines, but group has
score --hyp group --ref group --target xx             | --target xx is the tag of no language
score --hyp latin --ref group                         | latin: line 2 is not UTF-8 (; convert the file first
score --run one --lowercase                           | --lowercase needs --hyp
score --hyp one                                       | --hyp; --ref
score --hyp one --ref two                             | one: No such file
score --hyp files --ref group                         | --hyp 'files' is a folder; name a file
score --hyp group --ref group files                   | --ref 'files' is a folder; name a file
score --hyp grup --ref group                          | --hyp grup: No such file or directory, did you mean 'group'?
score --run one --subsets x                           | --subsets
test-norms --norm-module none.py                      | none.py; not a file
test-norms --norm-module group                        | group' is no Python file
norms --norm-module group                             | group' is no Python file
export w1.pt --pt2 group                              | --pt2 'group' is a file; name a folder
figures scored --output group                         | --output 'group' is a file; name a folder
reproduce verss --dry-run                             | there is no; did you mean 'verses'?
reproduce text --dry-run                              | 'text' is a folder; pn prepare text --corpus text --dest runs/data/text --source LANG --target LANG, then pn reproduce own_text --data runs/data/text
reproduce data                                        | 'data' is prepared data; name it by --data: pn reproduce own_text --data data
reproduce own_text                                    | the default of --data '; runs/data/own_text' is not prepared data: there is no such folder; name yours by --data DIR
reproduce --study own.yaml --dry-run                  | the default of data: '; runs/data/own_text' is not prepared data; add data: DIR to the part
reproduce --study own.yaml --data data                | argument --data: add data: data to the part, in the file of the study
reproduce --study own.yaml --norms ln,pn              | argument --norms: add norms: ln,pn to the part
report scored --output out --planned PN=loss          | 'PN=loss' is not SYSTEM:MEASURE, did you mean 'PN:loss'?
test-norms --norm-module broken.py                    | broken.py; ZeroDivisionError
test-norms --norm-module empty.py                     | empty.py; register_norm
test-norms my.py                                      | 'my.py' is no norm, did you mean '--norm-module my.py'?
test-norms PowerNorm                                  | unknown norm 'PowerNorm', did you mean 'power'?
test-norms pwoer                                      | 'pwoer'; did you mean 'power'
test-norms --norms x                                  | --norms
train                                                 | CONFIG
train verses_en_es                                    | did you mean 'verses_es_en'; iwslt14_de_en
train verses_es_en seed                               | 'seed'; key=value
train verses_es_en --max-update 100                   | did you mean 'optimization.max_update=100'?
train --lr=0.1 verses_es_en                           | did you mean 'optimization.lr=0.1'?
train verses_es_en --no-epoch-checkpoints             | did you mean 'checkpoint.no_epoch_checkpoints=true'?
train verses_es_en optimization.max_update = 100      | no blanks around '=', did you mean 'optimization.max_update=100'?
train verses_es_en common.seed= 3                     | did you mean 'common.seed=3'?
train verses_es_en common.seed =3 model.dropout=0     | did you mean 'common.seed=3'?
train verses_es_en --arch transformer_ln_tiny         | did you mean 'model._name=transformer_ln_tiny'?
train verses_es_en --criterion cross_entropy          | did you mean 'criterion._name=cross_entropy'?
train verses_es_en --encoder-norm batch --seed 3      | did you mean 'model.encoder_norm=batch'?
train verses_es_en --save-dir x                       | did you mean '--run x'?
train verses_en_es --max-update 100                   | unrecognized arguments: --max-update (see pn train --help)
train verses_es_en --data /nowhere                    | /nowhere; prepare
train verses_es_en --data daat                        | daat' is not prepared data; did you mean 'data'?
train verses_es_en --data data/bin --check            | data/bin' is inside of prepared data, did you mean '; place/data'?
train verses_es_en --data ./../place/data/bin         | place/data/bin' is inside of prepared data
train verses_es_en --data data/bin/dict.es.txt        | dict.es.txt' is inside of prepared data, did you mean '; place/data'?
train verses_es_en --data data/settings.txt           | settings.txt' is inside of prepared data, did you mean '; place/data'?
train verses_es_en --data data/tok/test               | is inside of prepared data, did you mean '; place/data'?
train own_text                                        | the default of --data '; runs/data/own_text' is not prepared data; name yours by --data DIR
train twice.yaml --check                              | twice.yaml; (model occurs twice, in lines 3 and 6: write one of them with all its keys)
train tab.yaml --check                                | tab.yaml; (line 2 has a tab, which YAML does not allow there: use blanks)
train verses_es_en --check --data nowhere --run new   | nowhere' is not prepared data: there is no such folder
train verses_es_en --check --data text                | text' is not prepared data: it has no settings.txt and no bin
train verses_es_en --data unset                       | unset' is not prepared data: it has no settings.txt (prepared data in '; place': data)
train verses_es_en --check --data a:b                 | a:b' has a colon
train verses_es_en --data data --run data             | --run; place/data' is prepared data; name another folder
train verses_es_en --data data --run w1.pt            | w1.pt' is a file; name a folder
train verses_es_en --data data --run others/with_data | --run; has a folder data, where a run has a file; name another folder
train verses_es_en --data data --run others/with_file | --run; checkpoints' is a file; name a folder
train verses_es_en --data data --run others/with_config | --run; has a config.yaml that is not of a run, which would be replaced
train verses_es_en --data data --run others/with_data --check | --run; has a folder data, where a run has a file; name another folder
train verses_es_en --data data --run others/with_file --check | --run; checkpoints' is a file; name a folder
train verses_es_en --data data --run others/with_config --check | --run; has a config.yaml that is not of a run, which would be replaced
train verses_es_en --data data --run data --check     | --run; is prepared data; name another folder
train verses_lm_en --check --data data                | data' was prepared for translation (es-en); language model
train verses_es_en --dat                              | --dat
translate --run run --input latin                     | latin: line 2 is not UTF-8 (; convert the file first
translate                                             | --run
translate --run data                                  | is not a training run
translate --run run --input none                      | none
translate --run run --input text                      | --input 'text' is a folder; name a file
translate --run run --input latn                      | --input latn: No such file or directory, did you mean 'latin'?
translate --run run --output nodir/translations       | there is no folder; nodir
translate --run run --output data                     | is a folder; name a file
"""

#: Settings for ``pn train verses_es_en --check``, which needs no data.
SETTINGS = """
model.encoder_norm=batchnorm            | did you mean 'batch'
model.norm_module=/nowhere/my.py        | no file '/nowhere/my.py'; name it by model.norm_module=FILE
model.dropout=1.5                       | model.dropout=1.5; below 1
model.attention_dropout=-0.1            | model.attention_dropout; at least 0
model.dropout=abc                       | model.dropout=abc; float
model.encoder_layers=2.5                | model.encoder_layers=2.5; int
model.activation_fn=rel                 | model.activation_fn=rel; relu; gelu
model.norm_variant=papers               | model.norm_variant=papers; 'paper', 'release'
model.encoder_layers=0                  | model.encoder_layers=0; at least 1
model.share_all_embeddings=3            | model.share_all_embeddings=3; true or false
model.encoder_attention_heads=3         | divisible
model.encoder_normalize_before=false    | normalize
model.layer_scale_groups=3              | groups=3 of layer-scale (layer_scale_groups); it is by 1, 2, 4, 8
model.norm_options.alpha_fw=0.5         | unknown norm option 'alpha_fw', did you mean the flag --norm-alpha-fwd?
model.norm_alpha_fw=0.5                 | did you mean 'model.norm_alpha_fwd'?
optimization.max_update=-1              | optimization.max_update=-1 is outside of its range; at least 0
optimization.max_update=0 checkpoint.patience=-1 | max_update=0 sets no limit; optimization.max_epoch
+model.norm_alpha_fwd=2                 | alpha_fwd=2
optimization.lr=-0.1                    | optimization.lr; at least 0
optimization.clip_norm=-1               | optimization.clip_norm; at least 0
dataset.max_tokens=-5                   | dataset.max_tokens; at least 1
dataset.batch_size=0                    | dataset.batch_size; at least 1
optimizer.weight_decay=abc              | weight_decay
optimizer.adam_betas=0.9                | optimizer.adam_betas=0.9; two numbers
optimizer.adam_betas=abc                | optimizer.adam_betas=abc; two numbers
model.dropout=0,3                       | model.dropout takes one value; a decimal number has a point: model.dropout=0.3
"optimizer.adam_betas='(0.9,2)'"        | optimizer.adam_betas=(0.9,2); below 1
optimizer.weight_decay=-1               | optimizer.weight_decay; at least 0
lr_scheduler.warmup_updates=-5          | warmup_updates; at least 0
lr_scheduler.warmup_updates=0           | warmup_updates=0; inverse_sqrt; give 1
average_last=0                          | average_last; at least 1
criterion.label_smoothing=1             | criterion.label_smoothing; below 1
optimization.lr=[0.1,0.2]               | learning rate
model.arch=transformer_pn_tiny          | unknown setting 'model.arch', did you mean 'model._name'?
optimizer.lr=0.1                        | unknown setting 'optimizer.lr'; did you mean 'optimization.lr=0.1'?
optimizer.lr=[0.1]                      | unknown setting 'optimizer.lr'; did you mean 'optimization.lr=[0.1]'?
lr_scheduler.lr=[0.1]                   | did you mean 'optimization.lr=[0.1]'?
criterion.sentence_avg=true             | did you mean 'optimization.sentence_avg=True'?
common.seed=1,2                         | common.seed takes one value in a run; 'pn reproduce'; --seeds 1,2; "common.seed='1,2'"
common.seed=[1,2]                       | common.seed takes one value in a run
common.seed=range(1,3)                  | common.seed takes one value in a run
model.dropout=[0.1,0.2]                 | model.dropout takes one value in a run
model._name=[a,b]                       | model._name takes one value in a run
model._name=pn                          | did you mean one of; transformer_lm_pn_tiny; transformer_pn_tiny; wmt_en_de_big?
"""

#: The same for a model of fairseq whose norms are converted.
CONVERSIONS = """
"model.convert_norms=['encoder.*=bach']"   | unknown norm 'bach', did you mean 'batch'?
"model.convert_norms='encoder.*'"          | 'encoder.*' is not 'PATTERN=NORM[,key=value...]'
"model.convert_norms=['encode.*=batch']"   | the pattern 'encode.*' matches no norm of the model
model.norm_ignore_mask=3                   | model.norm_ignore_mask=3 must be true or false
model.convert_norm=x                       | unknown setting 'model.convert_norm', did you mean 'model.convert_norms'?
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("refusals") / "place"
    small_run(place, 37)
    make_run(place / "scored")
    make_run(place / "lm", task___name="language_modeling")
    cut_corpus(place / "text", 9, 3, 3)
    (place / "files").mkdir()
    names = ("w1.pt", "w2.pt", "a:b.pt", "files/checkpoint1.pt", "files/checkpoint2.pt")
    for number, path in enumerate(names):
        history = [{"num_updates": number, "lr_scheduler_state": {}}]
        torch.save({"model": {"w": torch.ones(1)}, "optimizer_history": history}, place / path)
    (place / "link.pt").symlink_to("w2.pt")
    (place / "group").write_text((ROOT / "LICENSE").read_text())
    (place / "blank").touch()
    (place / "latin").write_bytes("plain\nnaïve\n".encode("latin-1"))
    (place / "settings.txt").write_bytes((place / "data/settings.txt").read_bytes())
    tables = {
        "key": "{label: LN, norm: layer, blue: 3}",
        "label": "{norm: layer}",
        "row": "3",
        "half": "{",
    }
    for name, row in tables.items():
        (place / f"{name}.yaml").write_text(f"rows: [{row}]")
    for folder in ("with_data/data", "with_file", "with_config"):
        (place / "others" / folder).mkdir(parents=True)
    (place / "others/with_file/checkpoints").write_text("a list\n")
    (place / "others/with_config/config.yaml").write_text("title: mine\n")
    (place / "twice.yaml").write_text("task: {_name: x}\n\nmodel:\n  _name: a\n\nmodel:\n  b: 1\n")
    (place / "tab.yaml").write_text("model:\n\t_name: a\n")
    part = "{corpus: own_text, seeds: [1], norms: [ln]}"
    (place / "own.yaml").write_text(f"about: mine\nparts: [{part}]\n")
    shutil.copytree(place / "text", place / "dev")
    for lang in ("es", "en"):
        (place / f"dev/valid.{lang}").rename(place / f"dev/dev.{lang}")
        (place / f"dev/test.{lang}").unlink()
    make_run(place / "models/lm", task___name="language_modeling")
    (place / "models/lm/data").write_text(f"{place}/data\n")
    shutil.copy(place / "data/settings.txt", place / "models/lm/data.settings")
    (place / "broken.py").write_text("1 / 0\n")
    (place / "unclosed.py").write_text("x = (\n")
    (place / "others/verses.py").touch()
    experiment = "from pn_fairseq.pipeline.data.experiment import Experiment\n"
    (place / "unnamed.py").write_text(f"{experiment}REPRODUCE = Experiment('', 'tiny')\n")
    part = "{corpus: empty.py, seeds: [1], norms: [ln]}"
    (place / "recipe.yaml").write_text(f"about: mine\nparts: [{part}]\n")
    (place / "unset/bin").mkdir(parents=True)
    (place / "empty.py").write_text('"""Nothing."""\n')
    return place


CHECK = "train verses_es_en --check "


CONVERTED = f"{CHECK}model._name=transformer_iwslt_de_en "
ROWS = rows(TABLE)
ROWS += [(f"{CHECK}{words}", line) for words, line in rows(SETTINGS)]
ROWS += [(f"{CONVERTED}{words}", line) for words, line in rows(CONVERSIONS)]


@pytest.mark.parametrize(("words", "line"), ROWS)
def test_a_mistake_is_one_line(words, line, place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # of the recipes and norms that a row names
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    result = in_process(*shlex.split(words), check=False)
    assert_refused(result, *line.split("; "))
    assert result.stderr.splitlines()[-1].startswith(f"pn {words.split()[0]}: error: ")
    assert not result.stdout
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before

"""Trains DFlash drafters: one process, one thread for each GPU role. It knows nothing of `dflash_ops`.

The main path, from the command line down; each knows only what is below it:

    __main__, cli       the command line
    launch, stored      `train`; `eval` and `export` of a checkpoint
    assembly            the real parts of a run, made from its configuration
    pipeline            the threads, the channels between them, and their order
    leader, outcomes    what drafter 0 does for the whole run after a step; checkpoints and evaluations as they come
    stages/             what each thread does: prefetch, target, drafter, verifier; `clock` times them
    parts               what stages and pipeline see of a target, a step, an evaluation: protocols
    step                one drafter's training step; inputs, optim, halves, graphs and step_checks are its own
    evaluate, decode    acceptance length, teacher-forced and truly decoded
    model/  data/       drafter, target, mask, loss; documents to packed rows

Beside it:

    settings, config, variants, topology        what a run is told, and where it runs
    scope, channel, gate, reduce, collectives   threads that live, wait, warm up and exchange gradients together
    checkpoint, tensor_tree, resume, signals    saving, going on, stopping
    events, metrics, summary, balance           what a run says of itself
    export, export_forms                        drafters in the published forms
    torch_setup, memory, foreseen               torch by version and thread; does it fit; errors without a traceback
    bench/                                      `trainer bench`: one part of the trainer beside a ceiling or a peer
"""

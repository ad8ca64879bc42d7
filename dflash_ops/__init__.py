"""Runs the trainer on a target, from a laptop. It never imports torch, and knows the trainer by its command line alone.

The main path, from the command line down:

    fabfile, __main__           the namespace of verbs
    cli, executor               what all verbs share; -H and hosts.yaml
    tasks, reading, care        the verbs: those that change a target, that look, and for living with a run
    launch, release, tail       what the verbs do, with pull, watch, diagnose, doctor, board, pages, provision, trust
    remote, bundle              one call of the agent: shipped as one file, asked, its framed answer read
    connect, transport/         how bytes reach a target: local, ssh, pct
    agent/                      what runs on the target. Standard library and libtmux only; of this package it may
                                import `bundle.SHARED` and incidents/, which are shipped with it
    agent/verbs                 its verbs; from there launch -> gate, cache, launchers -> supervise, which owns the run

Beside it:

    hosts, settings, named_file     hosts.yaml, validated
    preflight, health, events       policy without I/O: may a run start, how does it stand, what has it said
    incidents/                      evidence -> cause, runbook, safe next command
    console, dashboard, report      what the operator sees; scrub takes secrets out of it
    errors                          the error tree: exit codes, hints
    completion, demo                for the shell; `make demo`
"""

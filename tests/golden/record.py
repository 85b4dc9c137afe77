"""Record the golden decisions of this build. Run it on a build that is known to decide rightly, and commit what it writes.

python -m tests.golden.record            seeds and simulated jobs: some ten minutes
python -m tests.golden.record --live     three live jobs, on a cluster of their own: some three minutes

A change that is to change no decision must not record anything anew. One that changes decisions says in its message which
and why. Where words on the tape are renamed, digests change with them: then the live tapes must still replay, and the
digests are recorded anew in a commit that does nothing else.
"""

from __future__ import annotations

import argparse

from tests.golden import live, recorded

PROGRESS_EVERY = 50


def record_digests() -> None:
    digests: dict[recorded.Name, str] = {}
    for count, (name, run) in enumerate(recorded.RUNS.items(), start=1):
        digests[name] = run()
        if count % PROGRESS_EVERY == 0:
            print(f"{count} of {len(recorded.RUNS)}", flush=True)
    recorded.write(digests)
    failures = [f"{' '.join(name)}: {digest}" for name, digest in digests.items() if " " in digest]
    print("\n".join([f"{len(digests)} recorded, {len(failures)} of them fail", *failures]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__.split("\n")[0])
    parser.add_argument("--live", action="store_true", help="record the live tapes, and no digests")
    if parser.parse_args().live:
        live.record(recorded.FOLDER)
    else:
        record_digests()


if __name__ == "__main__":
    main()

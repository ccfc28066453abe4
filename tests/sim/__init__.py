"""Seeded simulator: kvd nodes, their engines, the links between them, and every fault of these.

One `random.Random(seed)` draws the world and every event in it; time is an integer; the machine
is the real one, and so is the owner's half of the gate. The same seed gives the same trace.

    python -m tests.sim 1028                    one seed: its options, and its verdict
    python -m tests.sim 1028 --trace            every event, effect, copy and fault of it
    python -m tests.sim 0 --seeds 5000 --jobs 2 many seeds
    python -m tests.sim 0 --seeds 200 --first --mutant "a redirect does not pin the pool"

    options   what a seed draws          world     everything that exists, and chance
    clock     virtual time               links     what loses, doubles, delays and reorders
    node      a kvd's shell              peers     its links to other kvds
    member    a process and its session  worker, layer_work, tenancy   a rank and its layers
    prefill   a prefill engine           decode    a decode engine
    memory    rows that know what they hold, and copies that know what they should see
    oracle    the rules                  cover     every copy in flight is held at both ends
    drain     what is left when faults stop         faults    what goes wrong
    run       one seed from its beginning to its verdict

What is true of each link: a member's slot events reach its kvd in order, are acknowledged and sent
again until then; its requests may be lost or doubled and are repeated; messages between kvds are
lost, doubled, late and reordered, and carry the boot ids of both ends; a gate word is seen late and
outlives the kvd that stored it. A kvd that starts again has an empty pool in new memory.

`seeds.txt` holds seeds that failed once, with the name of the bug.
"""

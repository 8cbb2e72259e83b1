"""The registered evidence flip: does a code go when its evidence goes, and stay when another code's does?

    edits       what is done to evidence: pure functions of a text
    statistics  the difference, its interval, and the effect that could be detected: arrays only
    outcomes    cases, edits and what models write after them
    plan        what is registered before anything runs, and its hash
    work        from a plan to a folder of tables
    commands    `flip register` and `flip run`
"""

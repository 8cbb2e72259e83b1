"""MISTILL: distil what a teacher's decision heads read into a smaller model, and judge it.

    groups      what a decision may read, as eight groups of characters
    loss        the distance of two pooled attentions
    rows        a student's attention at decisions, with its gradient
    targets     what the teacher read, kept with the transcripts
    pool        the heads of the student that are supervised
    trainer     `transformers.Trainer` with one more term
    arms        one training: a student, an arm, a seed
    evaluation  discovery on a trained student, blind to its arm; recovery, margins, task score
    manipulation  did training move what the pool reads
    matched, verdicts, figures   what may be said of arms, from tables alone
    campaign    all students, arms and seeds, resumable, and what comes of them
    work        from files to a campaign's folder
"""

"""Evidence alignment: do the heads that decide a code read what humans marked for it?

    alignment   mass, lift, specificity, AUROC, IoU and their tests: arrays only
    texts       the same gold codes, teacher-forced, with their evidence in tokens
    reading     what decision heads read of it, beside random heads, between arms; and what blocking it takes away
    arms        run folders that name heads, files that hold spans
    work        from files to a folder of tables
"""

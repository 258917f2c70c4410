"""Distillation to few steps: a student learns from a teacher. Runs without it open none of this.

1. teacher                 the network of another folder, or the base beneath the student's adapters
2. critic                  the first weights of the network that learns beside DMD's student
3. rollouts                the student's own steps, and passes without gradients on the way
4. average_velocity        `distill.method=opd`: the packs of a step -> their problems
5. distribution_matching   `distill.method=dmd`: the same, for the critic and for the student
"""

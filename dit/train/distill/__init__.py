"""Distillation to few steps: a student learns from a teacher. Other runs import none of this.

1. teacher                 the network of another folder, or the base under the student's adapters
2. critic                  initial weights of the critic, DMD's second trained network
3. rollouts                the student's own sampling steps, and passes without gradients there
4. average_velocity        `distill.method=opd`: the packs of a step -> regression problems
5. distribution_matching   `distill.method=dmd`: the same, for the critic and for the student
"""

"""Distillation to few steps: a student learns from a teacher. Other runs import none of this.

1. teacher                 the teacher: weights of another folder, or the base of adapters
2. critic                  initial weights of the critic, DMD's second trained network
3. rollouts                the student's own sampling steps, and passes without gradients at them
4. average_velocity        `distill.method=opd`: regression problems of a step for the student
5. distribution_matching   `distill.method=dmd`: regression problems for the critic and the student
"""

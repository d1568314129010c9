"""Work divided into units, done in this process, in several processes, or in Ray actors on many machines.

A task that can be divided has three parts, next to the task itself: a context manager that opens the function from a
unit to its result (`worker.UnitFunction` adds the input files that nodes must have), named units, and the head of a
journal. `units.map_units` runs them on the executor that `choose.executor_of` picks, and yields records in order.
"""

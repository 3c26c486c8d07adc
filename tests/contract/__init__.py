"""The contract every strategy passes: scenarios run under a strategy and under the plain one, then compared.

`rows` holds the table (one line a strategy), `scenarios` the runs, `bench` what a scenario may do, `record` the
comparison, `ranks` and `worker` the rows that need two processes.
"""

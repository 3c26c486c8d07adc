"""From profile to plan: costs, floor, search, trial; and plans as files and reports."""

from retime.mechanisms.memory_budget.planning.budget import parse_budget
from retime.mechanisms.memory_budget.planning.calibrate import calibrate
from retime.mechanisms.memory_budget.planning.candidates import part_sizes
from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.mechanisms.memory_budget.planning.costs import StepCosts
from retime.mechanisms.memory_budget.planning.floor import MemoryFloor
from retime.mechanisms.memory_budget.planning.given_plans import GivenPlans, read_plans, write_plans
from retime.mechanisms.memory_budget.planning.plan_after import plan_after
from retime.mechanisms.memory_budget.planning.report import BudgetReport, PlannedShape
from retime.mechanisms.memory_budget.planning.saved_plans import OtherPlansError, plans_in, state_of
from retime.mechanisms.memory_budget.planning.search import search_plan
from retime.mechanisms.memory_budget.planning.step_memory import StepMemory
from retime.mechanisms.memory_budget.planning.step_planner import Step, StepPlanner
from retime.mechanisms.memory_budget.planning.time_limit import OutOfTime, TimeLimit

__all__ = [
    "BudgetReport",
    "GivenPlans",
    "MemoryFloor",
    "OtherPlansError",
    "OutOfTime",
    "PlanChoice",
    "PlannedShape",
    "Step",
    "StepCosts",
    "StepMemory",
    "StepPlanner",
    "TimeLimit",
    "calibrate",
    "parse_budget",
    "part_sizes",
    "plan_after",
    "plans_in",
    "read_plans",
    "search_plan",
    "state_of",
    "write_plans",
]

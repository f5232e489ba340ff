"""dquery, dkey and dvalue in one kernel."""

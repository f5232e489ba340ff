"""dkey and dvalue, where dquery is made by a kernel of its own."""

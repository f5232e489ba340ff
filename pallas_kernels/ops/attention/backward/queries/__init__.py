"""dquery, where dkey and dvalue are made by a kernel of their own."""

package store

import clientv3 "go.etcd.io/etcd/client/v3"

// committing is a transaction with more to do when it is committed.
type committing struct {
	clientv3.Txn
	commit func(clientv3.Txn) (*clientv3.TxnResponse, error)
}

func (t *committing) If(conditions ...clientv3.Cmp) clientv3.Txn {
	t.Txn = t.Txn.If(conditions...)
	return t
}

func (t *committing) Then(ops ...clientv3.Op) clientv3.Txn {
	t.Txn = t.Txn.Then(ops...)
	return t
}

func (t *committing) Else(ops ...clientv3.Op) clientv3.Txn {
	t.Txn = t.Txn.Else(ops...)
	return t
}

func (t *committing) Commit() (*clientv3.TxnResponse, error) { return t.commit(t.Txn) }

package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/schema"
)

// Status is the state of the storage, for people and programs.
type Status struct {
	// Mode is embedded or external.
	Mode     string `json:"mode"`
	Revision int64  `json:"revision"`
	// Keys counts everything that is kept below Prefix.
	Keys    int64          `json:"keys"`
	Members []MemberStatus `json:"members"`
	// WritesRefused says why writes are refused; it is empty if they are accepted.
	WritesRefused string `json:"writesRefused,omitempty"`
	// Encryption is nil if nothing is encrypted, and no server was told to.
	Encryption *Encryption `json:"encryption,omitempty"`
}

// MemberStatus is the state of one etcd.
type MemberStatus struct {
	// Endpoint is its URL, or "embedded".
	Endpoint string `json:"endpoint"`
	Version  string `json:"version,omitempty"`
	Leader   bool   `json:"leader"`
	// SizeBytes is the size of the database, of which InUseBytes hold data. QuotaBytes is 0 if etcd does not say (before 3.6).
	SizeBytes  int64    `json:"sizeBytes"`
	InUseBytes int64    `json:"inUseBytes"`
	QuotaBytes int64    `json:"quotaBytes"`
	Alarms     []string `json:"alarms,omitempty"`
	// Error says why the member could not be asked.
	Error string `json:"error,omitempty"`
}

// embeddedName stands for the endpoint of the etcd in this process, which has none.
const embeddedName = "embedded"

// maintenance is what can be asked of etcd beside reading and writing keys.
type maintenance struct {
	client   *clientv3.Client
	embedded bool
	// quota, backend and disk are the embedded etcd's; applied counts the writes to it.
	quota   int64
	backend backend.Backend
	disk    *disk
	applied func() uint64
}

func (m *maintenance) endpoints() []string {
	if m.embedded {
		return []string{embeddedName}
	}
	return m.client.Endpoints()
}

// memberTimeout is how long one member may take to say how it is.
const memberTimeout = 3 * time.Second

// members asks every etcd for its state. It reads no data and writes nothing.
func (m *maintenance) members(ctx context.Context) []MemberStatus {
	var out []MemberStatus
	for _, endpoint := range m.endpoints() {
		out = append(out, m.member(ctx, endpoint))
	}
	return out
}

func (m *maintenance) member(ctx context.Context, endpoint string) MemberStatus {
	ctx, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	resp, err := m.client.Status(ctx, endpoint)
	if err != nil {
		return MemberStatus{Endpoint: endpoint, Error: err.Error()}
	}
	out := MemberStatus{
		Endpoint: endpoint, Version: resp.Version, Leader: resp.Leader == resp.Header.MemberId,
		SizeBytes: resp.DbSize, InUseBytes: resp.DbSizeInUse, QuotaBytes: resp.DbSizeQuota,
	}
	if m.embedded {
		out.QuotaBytes = m.quota // etcd's own is higher, see reserve
	}
	for _, text := range resp.Errors {
		for _, alarm := range []etcdserverpb.AlarmType{etcdserverpb.AlarmType_NOSPACE, etcdserverpb.AlarmType_CORRUPT} {
			if strings.Contains(text, alarm.String()) {
				out.Alarms = append(out.Alarms, alarm.String())
			}
		}
	}
	return out
}

// status completes the members' state with what is stored.
func (m *maintenance) status(ctx context.Context) (Status, error) {
	out := Status{Mode: "external", Members: m.members(ctx)}
	if m.embedded {
		out.Mode = embeddedName
	}
	resp, err := m.client.Get(ctx, Prefix+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return out, fmt.Errorf("count keys: %w", err)
	}
	out.Revision, out.Keys = resp.Header.Revision, resp.Count
	return out, nil
}

// compact drops every revision but the newest, and returns when the room is free. Unlike k8s.io/apiserver's periodic
// compaction it writes no key, which an etcd at its quota would refuse.
func (m *maintenance) compact(ctx context.Context) error {
	resp, err := m.client.Get(ctx, Prefix, clientv3.WithCountOnly())
	if err != nil {
		return err
	}
	_, err = m.client.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
	if err != nil && !isCompacted(err) {
		return fmt.Errorf("compact: %w", err)
	}
	return nil
}

// countFree has the embedded etcd count the pages that compaction has freed. It does so with the commit after the one that freed them, and
// not as long as somebody reads what was there before.
func (m *maintenance) countFree() {
	tx := m.backend.BatchTx()
	tx.LockOutsideApply()
	key := schema.FinishedCompactKeyName
	if _, values := tx.UnsafeRange(schema.Meta, key, nil, 0); len(values) == 1 {
		tx.UnsafePut(schema.Meta, key, bytes.Clone(values[0])) // without any change there is no commit
	}
	tx.Unlock()
	m.backend.ForceCommit()
}

// defragment gives the free pages of every member back to the file system, one member after the other, because a member
// answers nothing meanwhile.
func (m *maintenance) defragment(ctx context.Context) error {
	if m.embedded {
		return m.backend.Defrag() // the in-process client's call lacks a part that only a listening etcd has
	}
	var errs []error
	for _, endpoint := range m.endpoints() {
		if _, err := m.client.Defragment(ctx, endpoint); err != nil {
			errs = append(errs, fmt.Errorf("defragment %s: %w", endpoint, err))
		}
	}
	return errors.Join(errs...)
}

// disarm ends the alarm that makes etcd refuse writes. Other alarms stay.
func (m *maintenance) disarm(ctx context.Context) error {
	resp, err := m.client.AlarmList(ctx)
	if err != nil {
		return fmt.Errorf("list alarms: %w", err)
	}
	for _, alarm := range resp.Alarms {
		if alarm.Alarm != etcdserverpb.AlarmType_NOSPACE {
			continue
		}
		if _, err := m.client.AlarmDisarm(ctx, (*clientv3.AlarmMember)(alarm)); err != nil {
			return fmt.Errorf("disarm the NOSPACE alarm: %w", err)
		}
	}
	return nil
}

// snapshot streams the whole database, followed by its SHA-256.
func (m *maintenance) snapshot(ctx context.Context, to io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	from, err := m.client.Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	defer from.Close()
	if _, err := io.Copy(to, from); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}

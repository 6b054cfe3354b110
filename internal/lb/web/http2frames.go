package web

import (
	"encoding/binary"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// floodWindow is what the limits of frames are for.
const floodWindow = 10 * time.Second

// floodLimits are how many frames of a type one client may send in a window. They cost a client nothing and the server something: a
// stream that is opened and reset at once has perhaps reached an endpoint. A client that works normally sends a fraction of these.
// Streams that the server resets because of what the client sent count as resets: it is the same flood.
var floodLimits = [...]int{
	http2.FrameRSTStream: 2_000,
	http2.FrameSettings:  200,
	http2.FramePing:      10_000,
	http2.FramePriority:  10_000,
	http2.FrameData:      5_000, // without any data
}

type floods struct {
	began  int64
	counts [len(floodLimits)]int
}

// count notes a frame, and fails if there were too many of its type.
func (f *floods) count(kind http2.FrameType, now int64) error {
	if int(kind) >= len(floodLimits) || floodLimits[kind] == 0 {
		return nil
	}
	if now-f.began > floodWindow.Milliseconds() {
		*f = floods{began: now}
	}
	if f.counts[kind]++; f.counts[kind] > floodLimits[kind] {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

// handle does what one frame asks for.
func (c *http2Client) handle(frame http2.Frame) error {
	switch f := frame.(type) {
	case *http2.HeadersFrame:
		return c.handleHeaders(f)
	case *http2.DataFrame:
		return c.handleData(f)
	case *http2.WindowUpdateFrame:
		return c.handleWindowUpdate(f)
	case *http2.RSTStreamFrame:
		return c.handleReset(f)
	case *http2.SettingsFrame:
		return c.handleSettings(f)
	case *http2.PingFrame:
		if f.IsAck() {
			return nil
		}
		return c.control(http2.FramePing, func() {
			c.appendFrame(http2.FramePing, http2.FlagPingAck, 0, 8)
			c.out = append(c.out, f.Data[:]...)
		})
	case *http2.PriorityFrame:
		// Priorities are not followed.
		if f.StreamDep == f.StreamID {
			return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
		}
		return c.floods.count(http2.FramePriority, c.server.now())
	case *http2.PushPromiseFrame:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil // GOAWAY: the client will close; others mean nothing here
}

// control counts a frame, and queues the answer to it.
func (c *http2Client) control(kind http2.FrameType, answer func()) error {
	if err := c.floods.count(kind, c.server.now()); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.out) > mostQueued {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	answer()
	c.signal()
	return nil
}

func (c *http2Client) handleSettings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return nil
	}
	if f.NumSettings() > 64 {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	var failed error
	err := c.control(http2.FrameSettings, func() {
		failed = f.ForeachSetting(c.setting)
		c.appendFrame(http2.FrameSettings, http2.FlagSettingsAck, 0, 0)
	})
	if failed != nil {
		return failed
	}
	return err
}

// setting takes up one of the client's settings. The lock is held.
func (c *http2Client) setting(s http2.Setting) error {
	if err := s.Valid(); err != nil {
		return err
	}
	switch s.ID {
	case http2.SettingHeaderTableSize:
		size := min(s.Val, headerTable)
		if c.encoder == nil {
			c.encoder = hpack.NewEncoder((*http2Out)(c))
		}
		c.encoder.SetMaxDynamicTableSize(size)
		c.table, c.resized = int64(size), true
	case http2.SettingInitialWindowSize:
		change := int64(s.Val) - c.initial
		c.initial = int64(s.Val)
		for _, st := range c.open {
			if st.window += change; st.window > 1<<31-1 {
				return http2.ConnectionError(http2.ErrCodeFlowControl)
			}
			st.changed.Broadcast()
		}
	}
	return nil
}

func (c *http2Client) handleWindowUpdate(f *http2.WindowUpdateFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.StreamID == 0 {
		if c.window += int64(f.Increment); c.window > 1<<31-1 {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		c.unblock()
		return nil
	}
	st := c.open[f.StreamID]
	if st == nil {
		return c.idleStream(f.StreamID)
	}
	if st.window += int64(f.Increment); st.window > 1<<31-1 {
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeFlowControl}
	}
	st.changed.Broadcast()
	return nil
}

// idleStream is an error if the client has never opened a stream. The lock is held.
func (c *http2Client) idleStream(id uint32) error {
	if id > c.last || id%2 == 0 {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil
}

func (c *http2Client) handleReset(f *http2.RSTStreamFrame) error {
	c.mu.Lock()
	st := c.open[f.StreamID]
	if st == nil {
		defer c.mu.Unlock()
		if err := c.idleStream(f.StreamID); err != nil {
			return err
		}
		return c.floods.count(http2.FrameRSTStream, c.server.now())
	}
	st.forget(false)
	c.mu.Unlock()
	st.cancel()
	return c.floods.count(http2.FrameRSTStream, c.server.now())
}

// resetStream ends a stream because of what the client has sent.
func (c *http2Client) resetStream(id uint32, code http2.ErrCode) error {
	var st *http2Stream
	err := c.control(http2.FrameRSTStream, func() {
		c.appendReset(id, code)
		if st = c.open[id]; st != nil {
			st.forget(true)
		} else {
			c.remember(id, true)
		}
	})
	if st != nil {
		st.cancel()
	}
	return err
}

func (c *http2Client) handleData(f *http2.DataFrame) error {
	data := f.Data()
	if len(data) == 0 && !f.StreamEnded() {
		if err := c.floods.count(http2.FrameData, c.server.now()); err != nil {
			return err
		}
	}
	c.mu.Lock()
	st, err := c.accept(f, data)
	c.mu.Unlock()
	if err != nil || st == nil {
		return err
	}
	if st.ready && (st.ended || len(st.incoming) > bufferSize) {
		c.start(st)
	}
	return nil
}

// accept adds data to a stream's body. The lock is held.
func (c *http2Client) accept(f *http2.DataFrame, data []byte) (*http2Stream, error) {
	id, size := f.StreamID, int64(f.Length)
	if size > c.inflow {
		return nil, http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.inflow -= size
	st := c.open[id]
	if st == nil || st.ended {
		c.grant(size)
		if st == nil {
			if err := c.idleStream(id); err != nil {
				return nil, err
			}
			if was := c.remembered(id); was.id == id && was.reset {
				return nil, nil // it was on its way
			}
		}
		return nil, http2.StreamError{StreamID: id, Code: http2.ErrCodeStreamClosed}
	}
	st.received += int64(len(data))
	switch {
	case size > st.inflow:
		c.grant(size)
		return nil, http2.StreamError{StreamID: id, Code: http2.ErrCodeFlowControl}
	case st.declared >= 0 && (st.received > st.declared || f.StreamEnded() && st.received != st.declared):
		c.grant(size)
		return nil, http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	}
	st.inflow -= size
	// Padding is of no use to anybody: it may come again at once.
	st.credit += size - int64(len(data))
	c.grant(size - int64(len(data)))
	if st.incoming == nil && len(data) > 0 {
		st.incoming = takeBuffer()[:0]
	}
	st.incoming = append(st.incoming, data...)
	st.ended = f.StreamEnded()
	if !st.ready {
		st.changed.Broadcast()
	}
	return st, nil
}

// grant lets the client send as much as it has sent. The lock is held.
func (c *http2Client) grant(n int64) {
	if c.credit += n; c.credit >= connWindow/4 {
		c.appendWindowUpdate(0, c.credit)
		c.inflow += c.credit
		c.credit = 0
		c.signal()
	}
}

// appendFrame appends the header of a frame. The lock is held, as for all that follow.
func (c *http2Client) appendFrame(kind http2.FrameType, flags http2.Flags, id uint32, length int) {
	if c.out == nil {
		c.out = takeBuffer()[:0]
	}
	c.out = append(c.out, byte(length>>16), byte(length>>8), byte(length), byte(kind), byte(flags), byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
}

func (c *http2Client) appendReset(id uint32, code http2.ErrCode) {
	c.appendFrame(http2.FrameRSTStream, 0, id, 4)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(code))
}

func (c *http2Client) appendWindowUpdate(id uint32, n int64) {
	c.appendFrame(http2.FrameWindowUpdate, 0, id, 4)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(n))
}

func (c *http2Client) appendGoAway(last uint32, code http2.ErrCode) {
	c.appendFrame(http2.FrameGoAway, 0, 0, 8)
	c.out = binary.BigEndian.AppendUint32(c.out, last)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(code))
}

func (c *http2Client) appendSettings() {
	settings := []http2.Setting{
		{ID: http2.SettingMaxConcurrentStreams, Val: streams},
		{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		{ID: http2.SettingMaxHeaderListSize, Val: uint32(c.limits.Bytes)},
	}
	c.appendFrame(http2.FrameSettings, 0, 0, 6*len(settings))
	for _, s := range settings {
		c.out = binary.BigEndian.AppendUint16(c.out, uint16(s.ID))
		c.out = binary.BigEndian.AppendUint32(c.out, s.Val)
	}
	c.appendWindowUpdate(0, connWindow-65535)
}

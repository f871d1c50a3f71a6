package csrapproval

import "sync"

// deferred remembers the requests that are pending on our side: what was said about them, and whether another machine is in their way.
type deferred struct {
	mu     sync.Mutex
	byName map[string]*deferral
}

type deferral struct {
	contested bool
	// reported are the codes of the reasons that Events have told.
	reported map[string]bool
}

func newDeferred() *deferred { return &deferred{byName: map[string]*deferral{}} }

// watch has a request count as contested until it is noted whether it is.
func (d *deferred) watch(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	if d.byName[name] == nil {
		d.byName[name] = &deferral{reported: map[string]bool{}}
	}

	d.byName[name].contested = true
	d.count()
}

// note takes down why a watched request is deferred, and returns the codes that nobody was told before.
func (d *deferred) note(name string, others map[string][]string, codes []string) (news []string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	entry := d.byName[name]
	if entry == nil {
		return nil
	}

	entry.contested = len(others) > 0

	for _, code := range codes {
		if !entry.reported[code] {
			entry.reported[code] = true

			news = append(news, code)
		}
	}

	return news
}

// forget drops a request that is decided, or gone, or not ours.
func (d *deferred) forget(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	delete(d.byName, name)
	d.count()
}

// clear drops all.
func (d *deferred) clear() {
	d.mu.Lock()
	defer d.mu.Unlock()

	clear(d.byName)
	d.count()
}

// contested are the requests that another machine is in the way of.
func (d *deferred) contested() []string {
	d.mu.Lock()
	defer d.mu.Unlock()

	var names []string

	for name, entry := range d.byName {
		if entry.contested {
			names = append(names, name)
		}
	}

	return names
}

// count is called with mu held.
func (d *deferred) count() { pending.Set(float64(len(d.byName))) }

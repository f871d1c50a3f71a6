package csrpolicy_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Each bit of the signed part is flipped, and each byte removed, doubled and prefixed with a zero; then the request is
// signed again. If it is approved nevertheless, it must be true, such as a name in another case.
func TestReview_ApprovesModifiedSignedRequestOnlyIfTrue(t *testing.T) {
	approved := 0

	check := func(info []byte) {
		s := asks("worker-1")
		s.pkcs10.key = "ed25519"
		s.csr.Spec.Request = inPEM(s.pkcs10.sign(t, info))
		s.lookUp()

		verdict := csrpolicy.Review(csrpolicy.Parse(&s.csr), s.evidence)
		checkVerdict(t, s.csr, s.evidence, verdict)

		if verdict.Decision == csrpolicy.Approve {
			approved++
		}
	}

	genuine := asks("worker-1")
	genuine.pkcs10.key = "ed25519"
	info := genuine.pkcs10.info(t)

	for i := range info {
		for bit := range 8 {
			changed := slices.Clone(info)
			changed[i] ^= 1 << bit
			check(changed)
		}

		check(slices.Delete(slices.Clone(info), i, i+1))
		check(slices.Insert(slices.Clone(info), i, info[i]))
		check(slices.Insert(slices.Clone(info), i, 0))
	}

	// The letters of the three names, and the string types of the subject.
	letters := 0
	for _, name := range []string{"ec2-203-0-113-11.example.net", "ip-10-0-0-11.ec2.internal", "worker-1"} {
		letters += len(strings.Trim(strings.Map(letter, name), " "))
	}

	if approved < letters || approved > letters+4 {
		t.Errorf("%d changes approved, want %d for the letters and up to 4 more", approved, letters)
	}
}

func letter(r rune) rune {
	if 'a' <= r && r <= 'z' {
		return r
	}

	return -1
}

// Without a new signature no change is approved.
func TestReview_ApprovesNoModifiedByte(t *testing.T) {
	s := asks("worker-1")
	s.review(t)

	for i := range s.csr.Spec.Request {
		for _, b := range []byte{0, ' ', '\n', '-', 'A', s.csr.Spec.Request[i] ^ 1} {
			changed := s.csr.DeepCopy()
			if changed.Spec.Request[i] == b {
				continue
			}

			changed.Spec.Request[i] = b

			verdict := csrpolicy.Review(csrpolicy.Parse(changed), s.evidence)
			checkVerdict(t, *changed, s.evidence, verdict)

			last := i == len(changed.Spec.Request)-1 // white space
			if verdict.Decision == csrpolicy.Approve && !last {
				t.Errorf("approved with %q at %d", b, i)
			}
		}
	}
}

// Each field of the spec matters except those that do not describe the certificate.
func TestReview_ChecksEachFieldOfSpec(t *testing.T) {
	free := []string{"UID", "Extra"}

	for i := range reflect.TypeFor[certificatesv1.CertificateSigningRequestSpec]().NumField() {
		s := asks("worker-1")
		s.review(t)

		spec := reflect.ValueOf(&s.csr.Spec).Elem()
		name := spec.Type().Field(i).Name

		for _, change := range []func(reflect.Value){empty, halve, spoil} {
			changed := s.csr.DeepCopy()
			field := reflect.ValueOf(&changed.Spec).Elem().Field(i)
			change(field)

			if reflect.DeepEqual(changed.Spec, s.csr.Spec) {
				continue
			}

			if got := csrpolicy.Review(csrpolicy.Parse(changed), s.evidence).Decision; (got == csrpolicy.Approve) != slices.Contains(free, name) {
				t.Errorf("%s = %.200v: %s", name, field, got)
			}
		}
	}
}

func empty(v reflect.Value) { v.SetZero() }

func halve(v reflect.Value) {
	if v.Kind() == reflect.String || v.Kind() == reflect.Slice {
		v.Set(v.Slice(0, v.Len()/2))
	}
}

// spoil sets a value that is not acceptable.
func spoil(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.String {
			v.Index(0).SetString("x")
		} else {
			v.Set(reflect.Append(v, v.Index(0)))
		}
	default:
	}
}

// Whatever can be approved for a machine must be in the inventory's index of owners, or it could be approved for two
// machines.
func TestReview_ApprovesOnlyWhatInventoryIndexes(t *testing.T) {
	for _, r := range rows(t, genuine) {
		s := sceneOf(t, r.changes)
		s.review(t)

		names, ips := csrpolicy.Parse(&s.csr).Subjects()
		if len(names)+len(ips) == 0 {
			t.Fatalf("line %d: no names and addresses", r.line)
		}

		for _, ip := range ips {
			names = append(names, ip.String())
		}

		machines := inventory.New(func() time.Time { return now })
		machines.Replace(s.evidence.Machine.Nodename, s.evidence.Machine)

		for _, name := range names {
			fromRule := strings.Contains(r.changes, "extra-")
			if len(machines.Owners(name, "another")) == 0 && !fromRule {
				t.Errorf("line %d: %q can be approved, but the inventory has no owner", r.line, name)
			}
		}
	}
}

// allRows are the changes of all rows of the corpus.
var allRows = func() []string {
	var list []string

	for line := range strings.SplitSeq(genuine+hostile, "\n") {
		if changes, _, isRow := strings.Cut(line, " | "); isRow {
			list = append(list, strings.TrimSpace(changes))
		}
	}

	return list
}()

// randomScene combines the changes of up to three rows of the corpus. It is deterministic.
func randomScene(t testing.TB, seed uint64) *scene {
	t.Helper()

	r := rand.New(rand.NewPCG(seed, 0))

	var changes []string

	for range r.IntN(4) {
		changes = append(changes, allRows[r.IntN(len(allRows))])
	}

	// "as" comes first: it replaces the whole scene.
	slices.SortStableFunc(changes, func(a, b string) int { return strings.Compare(requester(b), requester(a)) })

	return sceneOf(t, strings.Join(changes, " "))
}

func requester(changes string) string {
	if strings.HasPrefix(changes, "as=") {
		return "as"
	}

	return ""
}

// Combined rows must not approve what no single row may.
func TestReview_ApprovesCombinedRowsOnlyIfTrue(t *testing.T) {
	decisions := map[csrpolicy.Decision]int{}

	for seed := range uint64(5000) {
		s := randomScene(t, seed)
		verdict := s.review(t)
		checkVerdict(t, s.csr, s.evidence, verdict)
		decisions[verdict.Decision]++
	}

	if len(decisions) != 4 {
		t.Errorf("got only %v", decisions)
	}
}

// FuzzReview reviews arbitrary bytes, as the request and as its signed part, with arbitrary users and evidence of the
// corpus.
func FuzzReview(f *testing.F) {
	seedRequests(f)

	f.Fuzz(func(t *testing.T, content []byte, user string, seed uint64) {
		s := randomScene(t, seed/2)
		s.csr.Spec.Request = content

		if seed%2 == 0 {
			s.pkcs10.key, s.pkcs10.flaws = "ed25519", nil
			s.csr.Spec.Request = inPEM(s.pkcs10.sign(t, content))
		}

		if user != "" {
			s.csr.Spec.Username = user
		}

		s.lookUp()

		before := s.csr.DeepCopy()
		request := csrpolicy.Parse(&s.csr)
		verdict := csrpolicy.Review(request, s.evidence)
		checkVerdict(t, s.csr, s.evidence, verdict)

		if again := csrpolicy.Review(request, s.evidence); !reflect.DeepEqual(again, verdict) {
			t.Errorf("not deterministic:\n%+v\n%+v", verdict, again)
		}

		if !reflect.DeepEqual(&s.csr, before) {
			t.Error("Parse or Review modified the CertificateSigningRequest")
		}
	})
}

func seedRequests(f *testing.F) {
	f.Helper()

	for i, r := range append(rows(f, genuine), rows(f, hostile)...) {
		s := sceneOf(f, r.changes)
		s.pkcs10.key = "ed25519"

		if request := s.pkcs10.encode(f); len(request) < 4096 {
			f.Add(request, s.csr.Spec.Username, uint64(2*i+1))
			f.Add(s.pkcs10.info(f), s.csr.Spec.Username, uint64(2*i))
		}
	}
}

func BenchmarkReview(b *testing.B) {
	s := asks("worker-1")
	s.review(b)

	for b.Loop() {
		if v := csrpolicy.Review(csrpolicy.Parse(&s.csr), s.evidence); v.Decision != csrpolicy.Approve {
			b.Fatal(v)
		}
	}
}

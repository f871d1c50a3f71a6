package csrpolicy_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Each bit of the signed part is flipped, and each byte removed, doubled and prefixed with a zero; then the request is
// signed again. If it is still approved, it must be true, such as a name in another case.
func TestReview_ApprovesModifiedSignedRequestOnlyIfTrue(t *testing.T) {
	s := sceneOf(t, "key=ed25519")
	info, approved := s.pkcs10.info(), 0

	check := func(info []byte) {
		s.csr.Spec.Request = inPEM(s.pkcs10.sign(info))
		if s.verdict(t).Decision == csrpolicy.Approved {
			approved++
		}
	}

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
	letters := len(regexp.MustCompile("[a-z]").FindAllString("ec2-203-0-113-11.example.net ip-10-0-0-11.ec2.internal worker-1", -1))
	assert.GreaterOrEqual(t, approved, letters)
	assert.LessOrEqual(t, approved, letters+4)
}

// Without a new signature no change is approved.
func TestReview_ApprovesNoModifiedByte(t *testing.T) {
	s := asks("worker-1")
	genuine := s.pkcs10.encode()

	for i := range genuine {
		for _, b := range []byte{0, ' ', '\n', '-', 'A', genuine[i] ^ 1} {
			if genuine[i] == b {
				continue
			}

			s.csr.Spec.Request = slices.Clone(genuine)
			s.csr.Spec.Request[i] = b
			decision := s.verdict(t).Decision

			if i < len(genuine)-1 { // the last byte is white space
				assert.NotEqual(t, csrpolicy.Approved, decision, "%q at %d", b, i)
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

			got := csrpolicy.Review(csrpolicy.Parse(changed), s.evidence).Decision
			assert.Equal(t, slices.Contains(free, name), got == csrpolicy.Approved, "%s = %.200v", name, field)
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

// A name or address that can be approved must be in the inventory's index of owners. Otherwise, it could be approved for
// two machines.
func TestReview_ApprovesOnlyWhatInventoryIndexes(t *testing.T) {
	for _, r := range rows(t, genuine) {
		s := sceneOf(t, r.changes)
		s.review(t)

		names := csrpolicy.Parse(&s.csr).Subjects
		require.NotEmpty(t, names, r.changes)

		machines := inventory.New(func() time.Time { return now })
		machines.Replace(s.evidence.Machine.Nodename, s.evidence.Machine)

		for _, name := range names {
			if !strings.Contains(r.changes, "extra-") {
				assert.NotEmpty(t, machines.Claims.ReportedBy(name, "another"), "%s: %q can be approved", r.changes, name)
			}
		}
	}
}

// randomScene combines the changes of up to three rows of the corpus. It is deterministic.
func randomScene(t testing.TB, corpus []row, seed uint64) *scene {
	t.Helper()

	r := rand.New(rand.NewPCG(seed, 0))

	var requesters, changes []string // requesters come first: "as" replaces the whole scene

	for range r.IntN(4) {
		if change := corpus[r.IntN(len(corpus))].changes; strings.HasPrefix(change, "as=") {
			add(&requesters, change)
		} else {
			add(&changes, change)
		}
	}

	return sceneOf(t, strings.Join(append(requesters, changes...), " "))
}

// Like single rows, combined rows must approve only requests that are true.
func TestReview_ApprovesCombinedRowsOnlyIfTrue(t *testing.T) {
	corpus := rows(t, genuine+hostile)
	decisions := map[csrpolicy.Decision]int{}

	for seed := range uint64(5000) {
		decisions[randomScene(t, corpus, seed).review(t).Decision]++
	}

	assert.Len(t, decisions, 4)
}

// FuzzReview reviews arbitrary bytes, as the request and as its signed part, with arbitrary users and evidence of the
// corpus.
func FuzzReview(f *testing.F) {
	corpus := rows(f, genuine+hostile)

	for i, r := range corpus {
		s := sceneOf(f, r.changes)
		s.pkcs10.key = "ed25519"

		if request := s.pkcs10.encode(); len(request) < 4096 {
			f.Add(request, s.csr.Spec.Username, uint64(2*i+1))
			f.Add(s.pkcs10.info(), s.csr.Spec.Username, uint64(2*i))
		}
	}

	f.Fuzz(func(t *testing.T, content []byte, user string, seed uint64) {
		s := randomScene(t, corpus, seed/2)
		s.csr.Spec.Request = content

		if seed%2 == 0 {
			s.pkcs10.key, s.pkcs10.flaws = "ed25519", nil
			s.csr.Spec.Request = inPEM(s.pkcs10.sign(content))
		}

		if user != "" {
			s.csr.Spec.Username = user
		}

		before := s.csr.DeepCopy()
		s.verdict(t)

		request := csrpolicy.Parse(&s.csr)
		assert.Equal(t, csrpolicy.Review(request, s.evidence), csrpolicy.Review(request, s.evidence), "not deterministic")
		assert.Equal(t, before, &s.csr, "Parse or Review modified the CertificateSigningRequest")
	})
}

func BenchmarkReview(b *testing.B) {
	for _, count := range []int{0, 64, 250, 1000} {
		s := asks("worker-1")
		s.addRouted(max(count-len(s.pkcs10.sans), 0))
		s.review(b)

		b.Run(fmt.Sprintf("subjects=%d", len(s.pkcs10.sans)), func(b *testing.B) {
			for b.Loop() {
				require.Equal(b, csrpolicy.Approved, csrpolicy.Review(csrpolicy.Parse(&s.csr), s.evidence).Decision)
			}
		})
	}
}
